# SPDX-License-Identifier: Apache-2.0
"""Backward and the optimizer's step, written behind the forward of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fleetlight.errors import PlanError
from fleetlight.static.graph.marks import GRADIENT
from fleetlight.static.graph.state import Slot, rate
from fleetlight.static.graph.variable import Variable
from fleetlight.static.writing import optimizers
from fleetlight.static.writing.recorder import Recorder

#: entries of a param group that may change: where the parameters are, and the learning rate
_FREE = {"params", "lr", "initial_lr"}
#: the name of the slot with what the gradients of a batch weigh
WEIGHT = "of the batch"


def write_backward(
    recorder: Recorder, loss: Variable, names: dict[int, str], optimizer: torch.optim.Optimizer
) -> dict[str, Variable]:
    """The gradients of the parameters that the optimizer trains, marked, by name.

    A parameter that the loss does not depend on has none, and stays as it is.
    """
    if loss.dim() != 0:
        raise PlanError(
            f"minimize: got a loss of shape {list(loss.shape)}, expected one number; take its mean"
        )
    if not loss.requires_grad:
        raise PlanError("minimize: the loss depends on no parameter that requires a gradient")
    trained = _trained(recorder, names, optimizer)
    with recorder.part_of("backward"), recorder.writing():
        weight = recorder.state("weight", WEIGHT, torch.ones((), dtype=loss.dtype))
        found = torch.autograd.grad(
            loss, [variable for _, variable in trained], [weight], allow_unused=True
        )
        recorder.chance.end()
        return {
            name: GRADIENT(gradient, name)
            for (name, _), gradient in zip(trained, found, strict=True)
            if gradient is not None
        }


def write_step(
    recorder: Recorder,
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
    gradients: dict[str, Variable],
) -> None:
    """The step of torch's own optimizer, on the state as it is when a program runs."""
    optimizers.begin(optimizer)
    groups = optimizer.param_groups
    with recorder.part_of("update"), recorder.writing():
        rates = [_rate(recorder, f"group {number}", group) for number, group in enumerate(groups)]
        parameters = [
            [recorder.state("parameter", names[id(p)], p) for p in group["params"]]
            for group in groups
        ]
        trained = {names[id(p)]: p for group in groups for p in group["params"] if p.requires_grad}
        variables = {name: recorder.state("parameter", name, p) for name, p in trained.items()}
        states: dict[Tensor, dict[str, Any]] = {
            variables[name]: _state(recorder, name, optimizer, p) for name, p in trained.items()
        }
        entering: dict[Tensor, Tensor] = {
            variables[name]: gradient for name, gradient in gradients.items()
        }
        optimizers.step(optimizer, parameters, entering, states, rates)


def _trained(
    recorder: Recorder, names: dict[int, str], optimizer: torch.optim.Optimizer
) -> list[tuple[str, Tensor]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if id(parameter) not in names:
            raise PlanError(
                f"the optimizer has a parameter of shape {list(parameter.shape)} that is not one "
                "of the model's; capture the model whose parameters it steps"
            )
    return [
        (names[id(p)], recorder.state("parameter", names[id(p)], p))
        for p in parameters
        if p.requires_grad
    ]


def _state(
    recorder: Recorder, name: str, optimizer: torch.optim.Optimizer, parameter: Tensor
) -> dict[str, Any]:
    """What the optimizer keeps for a parameter; whoever loads a state_dict puts other tensors."""

    def live(key: str) -> Slot:
        return Slot(
            "optimizer",
            f"{name}.{key}",
            optimizer.state[parameter][key],
            lambda: _kept(optimizer, parameter, key),
        )

    return {
        key: recorder.state("optimizer", f"{name}.{key}", value, live(key))
        if isinstance(value, Tensor)
        else value
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _kept(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str) -> Tensor:
    kept = optimizer.state.get(parameter)
    if not kept or key not in kept:
        # the state of an optimizer that has not stepped was loaded
        optimizers.begin(optimizer)
        kept = optimizer.state[parameter]
    tensor: Tensor = kept[key]
    return tensor


def _rate(recorder: Recorder, name: str, group: dict[str, Any]) -> Tensor:
    slot = rate(name, _reading(name, group))
    return recorder.state("rate", name, slot.tensor, slot)


def _reading(name: str, group: dict[str, Any]) -> Callable[[], float]:
    """The learning rate as it is now; what else a group says has become part of the program."""
    written = _options(group)

    def read() -> float:
        now = _options(group)
        if now != written:
            option = next(o for o in written if now.get(o) != written[o])
            raise PlanError(
                f"{name} of the optimizer: {option} is {now.get(option)!r} and was "
                f"{written[option]!r} when the program was written; of a program only the learning "
                "rate can be changed, so write it again"
            )
        return float(group["lr"])

    return read


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _FREE}
