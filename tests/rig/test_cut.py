# SPDX-License-Identifier: Apache-2.0
"""A host that disappears during a reduction: all workers end and name it."""

import sys
import threading
from pathlib import Path

import pytest
import torch
from rig.hosts import hosts
from tests.launch.workplace import wait_until
from tests.rig.needed import NEEDED, run_on
from tests.workers import WorkerFailedError
from torch import nn

import fleetlight as fleet
from fleetlight.errors import DeadlineError

pytestmark = NEEDED

DEADLINE_S = 15.0
#: workers 1 and 4 are on the second of three hosts
PLACES = (0, 1, 2, 0, 1)


def train(seen: Path) -> None:
    """Reduce hierarchically until it fails; `seen` counts successful steps."""
    plain = nn.Linear(256, 256)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    strategy = fleet.DistributedStrategy(use_hierarchical_allreduce=True)
    model = fleet.distributed_model(plain)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    try:
        for step in range(1_000_000):
            optimizer.zero_grad()
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
            if step == 3 and fleet.is_first_worker():
                seen.touch()
    except DeadlineError as error:
        # as at the end of a script: report to the others, which may ask worker 0
        sys.excepthook(type(error), error, None)
        raise


def ends(cut: int, seen: Path) -> list[str]:
    """The errors of the workers when this host is cut off during their reductions."""
    with hosts(3) as rig:

        def pull() -> None:
            wait_until(seen.exists, "the first reductions")
            rig.hosts[cut].cut()

        puller = threading.Thread(target=pull)
        puller.start()
        with pytest.raises(WorkerFailedError) as failed:
            run_on(rig, PLACES, train, seen, deadline_s=DEADLINE_S)
        puller.join()
    texts = str(failed.value).split("\nworker ")
    return [text.rstrip("\n").rpartition("\n")[2] for text in texts]


def test_remaining_workers_name_the_lost_ones(tmp_path: Path) -> None:
    errors = ends(1, tmp_path / "seen")
    assert len(errors) == len(PLACES)
    assert all("DeadlineError: all_reduce of the gradients at step" in text for text in errors)
    for index in (0, 2, 3):
        assert "worker 1 (pid " in errors[index]
        assert "(10.213.7.2)) has been silent for" in errors[index]
    # the workers that were cut off miss the others
    for index in (1, 4):
        assert "worker 0 (pid " in errors[index]
        assert (
            "(10.213.7.1)), which serves the job's rendezvous store, does not reply"
            in errors[index]
        )


def test_remaining_workers_name_the_host_of_the_store(tmp_path: Path) -> None:
    errors = ends(0, tmp_path / "seen")
    assert len(errors) == len(PLACES)
    for index in (1, 2, 4):
        assert "worker 0 (pid " in errors[index]
        assert (
            "(10.213.7.1)), which serves the job's rendezvous store, does not reply"
            in errors[index]
        )
    for index in (0, 3):
        assert "worker 1 (pid " in errors[index]
        assert "(10.213.7.2)) has been silent for" in errors[index]
