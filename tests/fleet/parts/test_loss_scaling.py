# SPDX-License-Identifier: Apache-2.0
"""What is known of torch's loss scaler: who it is while it steps; how to tell it an infinity."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from fleetlight.fleet.parts.loss import scaler_at_work
from fleetlight.torch_compat.optimizers import tell_infinity


def scaled(optimizer: torch.optim.Optimizer) -> torch.amp.GradScaler:
    """A scaler with gradients to step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    parameter = optimizer.param_groups[0]["params"][0]
    scaler.scale(parameter.sum()).backward()
    return scaler


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def test_it_is_found_from_a_hook_of_the_step_and_nowhere_else() -> None:
    optimizer = sgd()
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    found: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: found.append(scaler_at_work()))
    scaler = scaled(optimizer)
    scaler.step(optimizer)
    optimizer.step()
    assert found == [scaler, None]
    assert scaler_at_work() is None


def test_batches_of_those_who_step_are_let_go() -> None:
    class Batch:
        """Whatever a script holds while it steps."""

    optimizer = sgd()
    optimizer.register_step_pre_hook(lambda *_: found.append(scaler_at_work()))
    scaler = scaled(optimizer)
    for step in (lambda: scaler.step(optimizer), optimizer.step):
        found: list[Any] = []
        batch = Batch()
        left = weakref.ref(batch)
        step()
        del batch
        # not only once this function ends
        assert left() is None
        assert len(found) == 1


def test_who_is_told_of_an_infinity_backs_off() -> None:
    optimizer = sgd()
    scaler = scaled(optimizer)
    scaler.step(optimizer)
    tell_infinity(scaler, optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    # of an optimizer it has not stepped it keeps nothing
    tell_infinity(scaler, sgd())
    scaled(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
