# SPDX-License-Identifier: Apache-2.0
"""Optimizer state: its mean, missing state, and a reset to what torch starts with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.collective.local_training.simulated import together
from torch import nn

from fleetlight.collective.local_training import engine as moments
from fleetlight.errors import DivergedError

KINDS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
}


def stepped(kind: str, seed: int, steps: int = 3, parameters: int = 2) -> torch.optim.Optimizer:
    """An optimizer after some steps on the first of its two parameters, or on both."""
    params = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4))]
    optimizer: torch.optim.Optimizer = KINDS[kind](params)
    step_on(optimizer, seed, steps, parameters)
    return optimizer


def step_on(optimizer: torch.optim.Optimizer, seed: int, steps: int, parameters: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in optimizer.param_groups[0]["params"][:parameters]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def state_of(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    return [dict(optimizer.state[p]) for p in optimizer.param_groups[0]["params"]]


def averaged(worker: Any) -> Any:
    optimizer = stepped("adam", seed=worker.index)
    before = [{key: t.clone() for key, t in one.items()} for one in state_of(optimizer)]
    moments.average(optimizer, worker, worker)
    return before, state_of(optimizer)


def test_tensors_are_averaged_and_step_counts_kept() -> None:
    (before, after), (other_before, other_after) = together(averaged)
    for mine, theirs, end, other_end in zip(before, other_before, after, other_after, strict=True):
        assert set(end) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            torch.testing.assert_close(end[key], (mine[key] + theirs[key]) / 2)
            assert torch.equal(end[key], other_end[key])
        assert end["step"] == 3.0


def averaged_with_gaps(worker: Any) -> Any:
    """Worker 0 has no gradient for the second parameter, and no state for it."""
    optimizer = stepped("adam", seed=worker.index, parameters=1 + worker.index)
    before = optimizer.state[optimizer.param_groups[0]["params"][1]].get("exp_avg")
    before = None if before is None else before.clone()
    moments.average(optimizer, worker, worker)
    step_on(optimizer, seed=7, steps=1)
    return before, state_of(optimizer)


def test_missing_state_counts_as_zeros() -> None:
    (nothing, first), (some, second) = together(averaged_with_gaps)
    assert nothing is None
    assert some is not None
    assert first[1]["step"] == second[1]["step"] == 4.0
    for mine, theirs in zip(first, second, strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in ("exp_avg", "exp_avg_sq"))


def average_different_types(worker: Any) -> str:
    dtype = torch.float64 if worker.index else torch.float32
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(DivergedError) as error:
        moments.average(optimizer, worker, worker)
    return str(error.value)


def test_states_of_different_types_are_named() -> None:
    for text in together(average_different_types):
        assert "momentum_buffer of parameter 0 in group 0 is float64[3] on one worker" in text


def check_equal_steps(optimizer: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """From equal parameters, equal states give equal steps."""
    both = [one.param_groups[0]["params"] for one in (optimizer, new)]
    with torch.no_grad():
        torch._foreach_copy_(*both)
    for one in (optimizer, new):
        step_on(one, seed=5, steps=2)
    for mine, fresh in zip(*both, strict=True):
        assert torch.equal(mine, fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_reset_an_optimizer_steps_as_a_new_one(kind: str) -> None:
    optimizer, new = stepped(kind, seed=0), stepped(kind, seed=0, steps=0)
    moments.reset(optimizer)
    check_equal_steps(optimizer, new)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dampening"])
def test_a_reset_in_place_keeps_the_tensors(kind: str) -> None:
    optimizer, new = stepped(kind, seed=0), stepped(kind, seed=0, steps=0)
    before = state_of(optimizer)
    moments.reset(optimizer, in_place=True)
    for mine, kept in zip(state_of(optimizer), before, strict=True):
        assert all(mine[key] is kept[key] for key in kept)
    check_equal_steps(optimizer, new)
