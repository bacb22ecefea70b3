# SPDX-License-Identifier: Apache-2.0
"""Torch's loss scaler: found while it steps, and informed of an infinity of another worker."""

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


def test_scaler_is_found_only_from_a_step_hook() -> None:
    optimizer = sgd()
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    found: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: found.append(scaler_at_work()))
    scaler = scaled(optimizer)
    scaler.step(optimizer)
    optimizer.step()
    assert found == [scaler, None]
    assert scaler_at_work() is None


def test_search_keeps_no_batch_of_the_caller_alive() -> None:
    class Batch:
        """An object that a script holds during a step."""

    optimizer = sgd()
    optimizer.register_step_pre_hook(lambda *_: found.append(scaler_at_work()))
    scaler = scaled(optimizer)
    for step in (lambda: scaler.step(optimizer), optimizer.step):
        found: list[Any] = []
        batch = Batch()
        left = weakref.ref(batch)
        step()
        del batch
        # freed before this function ends
        assert left() is None
        assert len(found) == 1


def test_scaler_informed_of_an_infinity_backs_off() -> None:
    optimizer = sgd()
    scaler = scaled(optimizer)
    scaler.step(optimizer)
    tell_infinity(scaler, optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    # the scaler keeps nothing for an optimizer it has not stepped
    tell_infinity(scaler, sgd())
    scaled(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
