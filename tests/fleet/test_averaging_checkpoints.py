# SPDX-License-Identifier: Apache-2.0
"""Checkpoints under local training: a continued job equals a loaded one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fleet.local_training import OPTIMIZERS, Case, batches, everything, loss_of, network
from tests.workers import run_workers
from torch import nn

import fleetlight as fleet
from fleetlight.fleet.job import current

pytestmark = pytest.mark.multiprocess

BEFORE, AFTER = 5, 7

ADAPTIVE = {
    "adaptive_localsgd": True,
    "adaptive_localsgd_configs": {"init_k_steps": 3, "begin_step": 0},
}
KINDS: dict[str, Any] = {
    "adam-kept": ("adam", Case(k=4, begin_step=1).settings()),
    "diloco": ("momentum", Case(k=3, begin_step=0, outer=(0.7, 0.9)).settings()),
    "adaptive": ("momentum", ADAPTIVE),
}


def registered(kind: str, **more: Any) -> tuple[nn.Module, Any]:
    optimizer, settings = KINDS.get(kind, (kind, {}))
    model = fleet.distributed_model(network())
    strategy = fleet.DistributedStrategy(**settings, **more)
    return model, fleet.distributed_optimizer(OPTIMIZERS[optimizer](model.parameters()), strategy)


def train(model: nn.Module, optimizer: Any, first: int, steps: int) -> None:
    for batch in batches(fleet.worker_index(), first + steps)[first:]:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def end_of(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    states = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
    return [everything(model), *(state[key].clone() for state in states for key in sorted(state))]


def schedule_of() -> Any:
    alone = current().optimizers[0].local_steps
    assert alone is not None
    return alone.engine.schedule


def save_and_continue(kind: str, dirname: str) -> Any:
    model, optimizer = registered(kind)
    train(model, optimizer, 0, BEFORE)
    fleet.save_persistables(dirname, background=True)
    at_the_save = end_of(model, optimizer)
    train(model, optimizer, BEFORE, AFTER)
    return at_the_save, end_of(model, optimizer), schedule_of().state()


def load_and_continue(kind: str, dirname: str, steps_before: int) -> Any:
    model, optimizer = registered(kind)
    train(model, optimizer, 20, steps_before)  # gradients that a load drops
    fleet.load_persistables(dirname)
    train(model, optimizer, BEFORE, AFTER)
    return end_of(model, optimizer), schedule_of().state()


@pytest.mark.parametrize(
    ("kind", "steps_before"),
    [("adam-kept", 0), ("diloco", 2), ("adaptive", 4)],
    ids=lambda value: str(value),
)
def test_continued_job_equals_a_loaded_one(kind: str, steps_before: int, tmp_path: Path) -> None:
    continued = run_workers(save_and_continue, 2, kind, str(tmp_path))
    loaded = run_workers(load_and_continue, 2, kind, str(tmp_path), steps_before)
    # after the save all workers are equal, also in their optimizer states
    assert same(continued[0][0], continued[1][0])
    assert not same(continued[0][1], continued[1][1])
    for (_, end, state), (again, other_state) in zip(continued, loaded, strict=True):
        assert same(end, again)
        assert state == other_state


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def save(kind: str, dirname: str) -> None:
    model, optimizer = registered(kind)
    train(model, optimizer, 0, BEFORE)
    fleet.save_persistables(dirname)


def load(kind: str, dirname: str) -> Any:
    model, optimizer = registered(kind)
    fleet.load_persistables(dirname)
    values = everything(model)
    train(model, optimizer, BEFORE, 1)
    alone = current().optimizers[0].local_steps
    return values, current().step, None if alone is None else alone.engine.schedule.state()


@pytest.mark.parametrize(
    ("saved", "loaded", "workers", "state"),
    [
        ("diloco", "diloco", 3, {"step": 6, "last": 5}),
        ("momentum", "diloco", 2, {"step": 6, "last": 5}),
        ("diloco", "momentum", 2, None),
    ],
    ids=["more-workers", "from-synchronous", "to-synchronous"],
)
def test_jobs_of_other_kinds_load_the_checkpoint(
    saved: str, loaded: str, workers: int, state: Any, tmp_path: Path
) -> None:
    run_workers(save, 2, saved, str(tmp_path))
    first, *others = run_workers(load, workers, loaded, str(tmp_path))
    assert first[1:] == (BEFORE + 1, state)
    for values, *rest in others:
        assert torch.equal(values, first[0])
        assert rest == list(first[1:])
