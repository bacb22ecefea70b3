# SPDX-License-Identifier: Apache-2.0
"""The content of a snapshot."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.states import snapshot, whole_step

from fleetlight import checkpoint
from fleetlight.errors import CheckpointError


def test_the_manifest_describes_the_snapshot(tmp_path: Path) -> None:
    extra = {"best": (0.5, math.inf), "note": None}
    job_snapshot = dataclasses.replace(snapshot(5), seed=3, epoch=2, server_num=4, extra=extra)
    written = checkpoint.write(tmp_path, job_snapshot)
    found = checkpoint.read(tmp_path)
    assert dataclasses.asdict(job_snapshot)["step"] == found.manifest.step == 5
    assert (found.manifest.seed, found.manifest.epoch) == (3, 2)
    assert (found.manifest.workers, found.manifest.servers) == (1, 4)
    assert found.manifest.torch == torch.__version__
    assert found.manifest.created == written.created
    assert found.extra == extra
    kinds = {entry.name: (entry.kind, entry.file) for entry in found.manifest.tensors}
    assert kinds["weight"] == ("parameter", "model.safetensors")


def test_a_detached_snapshot_does_not_follow_training(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    names = {param: name for name, param in module.named_parameters()}
    live = checkpoint.JobSnapshot(
        model=checkpoint.model_state(module),
        optimizers=[checkpoint.optimizer_state(optimizer, names)],
        workers=[checkpoint.WorkerState(rank=0, tensors={"r": torch.ones(1)})],
    )
    frozen = live.detached()
    before = module.weight.detach().clone()
    optimizer.step()
    live.workers[0].tensors["r"].zero_()
    checkpoint.write(tmp_path, frozen)
    found = checkpoint.read(tmp_path)
    assert torch.equal(found.model().tensors["weight"], before)
    state, worker = found.optimizers()[0], found.worker(0)
    assert state is not None
    assert state.tensors["weight.step"].item() == 1
    assert worker is not None
    assert worker.tensors["r"].item() == 1


def test_a_detached_snapshot_keeps_extra_as_it_was() -> None:
    extra: dict[str, Any] = {"rates": [0.1, (2, math.inf)]}
    frozen = checkpoint.JobSnapshot(model=checkpoint.ModelState({}, {}), extra=extra).detached()
    extra["rates"].append(0.2)
    assert frozen.extra == {"rates": [0.1, (2, math.inf)]}


def test_unsupported_values_are_refused_when_detaching() -> None:
    empty = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(CheckpointError, match=r"'weight' cannot be saved: got a .* on meta"):
        checkpoint.JobSnapshot(model=checkpoint.model_state(empty)).detached()
    unsupported = checkpoint.JobSnapshot(model=checkpoint.ModelState({}, {}), extra={"best": print})
    with pytest.raises(CheckpointError, match=r"extra\.best cannot be saved: got a"):
        unsupported.detached()


@pytest.mark.parametrize("ranks", [[1], [0, 0], [1, 0], [0, 2]])
def test_a_missing_or_repeated_worker_is_refused(tmp_path: Path, ranks: list[int]) -> None:
    checkpoint.write(tmp_path, snapshot(1))
    workers = [checkpoint.WorkerState(rank=rank) for rank in ranks]
    with pytest.raises(CheckpointError, match=r"states of workers \[.*one of each worker"):
        checkpoint.write(tmp_path, dataclasses.replace(snapshot(2), workers=workers))
    assert whole_step(tmp_path) == 1


@pytest.mark.parametrize("value", [print, torch.ones(1)])
def test_an_unsupported_extra_value_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"extra\.best cannot be saved: got a"):
        checkpoint.write(tmp_path, dataclasses.replace(snapshot(1), extra={"best": value}))
