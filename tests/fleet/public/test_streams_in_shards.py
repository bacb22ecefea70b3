# SPDX-License-Identifier: Apache-2.0
"""Jobs whose workers read shards of a stream: equal steps, checkpoints, stops, other workers."""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.sources.sharded_streams import ShardedNumbers
from tests.served import ASYNC, SYNC, Built, Job, Member, Net, loss_of
from tests.workers import WorkerFailedError, descend, run_processes
from torch.utils.data import DataLoader

import fleetlight as fleet
from fleetlight.data import ShardLoader
from fleetlight.fleet.checkpoints.autosave import Stopped

SIZES = [9, 30, 4, 22, 13]


def train(folder: str, stops: bool, resumes: bool, by_hand: bool) -> list[int]:
    """The records that this worker trains on in an epoch, until a save if it `stops`."""
    if not by_hand:
        os.environ["FLEET_CHECKPOINT"], os.environ["FLEET_RESUME"] = folder, str(int(resumes))
    fleet.init(is_collective=True)
    model = fleet.distributed_model(torch.nn.Linear(1, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-6))
    loader = fleet.shard(DataLoader(ShardedNumbers.of(SIZES), 2), deal="shards")
    if resumes and by_hand:
        fleet.load_persistables(folder)
    seen: list[int] = []
    try:
        for step, batch in enumerate(loader, start=1):
            seen += batch[: loader.counted].tolist()
            descend(optimizer, model(batch[:, None].float()).mean())
            if stops and step == 5 and by_hand:
                fleet.save_persistables(folder)
                break
            if stops and step == 5 and fleet.worker_index():
                os.kill(os.getpid(), signal.SIGTERM)
    except Stopped:
        assert stops
    fleet.stop_worker()
    return seen


@pytest.mark.multiprocess
@pytest.mark.parametrize("by_hand", [True, False])
def test_job_resumes_with_as_many_workers(tmp_path: Path, by_hand: bool) -> None:
    folder = str(tmp_path / "saved")
    before = run_processes(train, [(folder, True, False, by_hand)] * 2)
    with pytest.raises(WorkerFailedError, match=r"position of 2 workers, .* here are 1"):
        run_processes(train, [(folder, False, True, by_hand)])
    rest = run_processes(train, [(folder, False, True, by_hand)] * 2)
    assert Counter(n for one in [*before, *rest] for n in one) == Counter(range(sum(SIZES)))
    assert sum(map(len, before)) < sum(SIZES) / 2


def build() -> Built:
    model = Net()
    return model, [torch.optim.SGD(model.parameters(), lr=0.01)]


def work(member: Member) -> tuple[int, list[int]]:
    """The number of steps, and the records, of an epoch in a job with servers."""
    loader: ShardLoader[Any] = ShardLoader(
        DataLoader(ShardedNumbers.of([9, 30, 4]), 2),
        worker=member.index,
        workers=2,
        seed=0,
        tail="join",
        agree=member.context.agree_on_batches,
    )
    member.context.loaders.append(loader)
    steps, seen = 0, []
    for batch in loader:
        steps += 1
        seen += batch[: loader.counted].tolist()
        member.descend(
            loss_of(member.model, batch[:, None].repeat(1, 3), torch.zeros(len(batch), 1))
        )
    return steps, seen


@pytest.mark.parametrize(("mode", "steps"), [(SYNC, [15, 15]), (ASYNC, [7, 15])])
def test_workers_with_servers_agree_where_they_step_together(mode: Any, steps: list[int]) -> None:
    found = Job(build, mode, workers=2, servers=2).run(work)
    assert [made for made, _ in found] == steps
    assert Counter(n for _, own in found for n in own) == Counter(range(43))
