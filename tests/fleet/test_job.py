# SPDX-License-Identifier: Apache-2.0
"""Attached schedulers of every class resume from the saved state."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from fleetlight.checkpoint.formats.values import pack, unpack
from fleetlight.errors import CheckpointError
from fleetlight.fleet.job import Schedulers

Make = Callable[[torch.optim.Optimizer], list[Any]]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0, momentum=0.9)


def stepped(made: list[Any], one: torch.optim.Optimizer, steps: int) -> list[float]:
    """The learning rate after each step."""
    rates = []
    for number in range(steps):
        one.step()
        for scheduler in made:
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(1.0 + number % 2)
            else:
                scheduler.step()
        rates.append(float(one.param_groups[0]["lr"]))
    return rates


def sequential(one: torch.optim.Optimizer) -> list[Any]:
    parts = [lr_scheduler.LinearLR(one, 0.1, total_iters=3), lr_scheduler.ExponentialLR(one, 0.8)]
    return [lr_scheduler.SequentialLR(one, parts, [3])]


CASES: dict[str, Make] = {
    "steps": lambda o: [lr_scheduler.StepLR(o, 3, 0.5)],
    "milestones": lambda o: [lr_scheduler.MultiStepLR(o, [2, 5, 5, 9])],
    "cosine": lambda o: [lr_scheduler.CosineAnnealingLR(o, 20)],
    "one cycle": lambda o: [lr_scheduler.OneCycleLR(o, 1.0, total_steps=20)],
    "cyclic": lambda o: [lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3)],
    "by a function": lambda o: [lr_scheduler.LambdaLR(o, lambda n: 0.9**n)],
    "plateau": lambda o: [lr_scheduler.ReduceLROnPlateau(o, patience=1)],
    "sequential": sequential,
    "two": lambda o: [lr_scheduler.StepLR(o, 3, 0.5), lr_scheduler.ExponentialLR(o, 0.9)],
}


def attached(*made: Any) -> Schedulers:
    schedulers = Schedulers()
    for one in made:
        schedulers.attach(one)
    return schedulers


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_schedulers_resume(make: Make) -> None:
    first = optimizer()
    made = make(first)
    stepped(made, first, 7)
    states, tensors = attached(*made).states([first]), {}
    saved: Any = unpack(pack(states, "schedulers", tensors), tensors)
    other = optimizer()
    again = make(other)
    other.load_state_dict(first.state_dict())
    attached(*again).load(saved, [other])
    assert stepped(again, other, 9) == stepped(made, first, 9)


def test_only_schedulers_of_the_given_optimizers_are_saved() -> None:
    mine, others = optimizer(), optimizer()
    kept, other = (lr_scheduler.StepLR(one, 3) for one in (mine, others))
    assert attached(kept, other, kept).of([mine]) == [kept]


def test_schedulers_unlike_the_saved_ones_are_an_error() -> None:
    mine, other = optimizer(), optimizer()
    one, two = lr_scheduler.StepLR(mine, 3), lr_scheduler.ExponentialLR(other, 0.9)
    schedulers = attached(one, two)
    with pytest.raises(CheckpointError, match="with the schedulers StepLR, this job has Expon"):
        schedulers.load(schedulers.states([mine]), [other])
    assert (one.last_epoch, two.last_epoch) == (0, 0)


def test_unattached_scheduler_warns_once_and_does_not_resume(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("fleetlight"), "propagate", True)
    mine, plain = optimizer(), optimizer()
    lr_scheduler.StepLR(mine, 3)
    schedulers = Schedulers()
    for _ in range(2):
        schedulers.warn_of_unattached([plain, mine])
    assert caplog.text.count("scheduler of optimizer 1 is not attached") == 1
    assert "optimizer 0" not in caplog.text
    with pytest.raises(CheckpointError, match=r"optimizer 0 is not attached.*fleet\.attach"):
        schedulers.load([], [mine])
    schedulers.load([], [plain])
