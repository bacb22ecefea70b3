# SPDX-License-Identifier: Apache-2.0
"""Writes backward and the optimizer's step after the forward of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fleetlight.errors import PlanError
from fleetlight.static.graph.state import Slot, rate
from fleetlight.static.graph.variable import Variable
from fleetlight.static.ops.marks import GRADIENT
from fleetlight.static.writing import optimizers
from fleetlight.static.writing.recorder import Recorder

#: entries of a param group that may change: the parameters and the learning rate
_FREE = {"params", "lr", "initial_lr"}
#: the name of the slot with the weight of a batch's gradients
WEIGHT = "of the batch"


def write_backward(
    recorder: Recorder, loss: Variable, names: dict[int, str], optimizer: torch.optim.Optimizer
) -> dict[str, Variable]:
    """Write backward; return the marked gradients of the optimizer's parameters by name.

    A parameter that the loss does not depend on has none and does not change.
    """
    if loss.dim() != 0:
        raise PlanError(
            f"minimize: got a loss of shape {list(loss.shape)}, expected one number; take its mean"
        )
    if not loss.requires_grad:
        raise PlanError("minimize: the loss depends on no parameter that requires a gradient")
    trained = _trained(recorder, names, optimizer)
    with recorder.part_of("backward"), recorder.writing():
        ones = torch.ones((), dtype=loss.dtype)
        slot = Slot("weight", WEIGHT, ones)
        weight = recorder.state("weight", WEIGHT, ones, slot)
        found = torch.autograd.grad(
            loss, [variable for _, variable in trained], [weight], allow_unused=True
        )
        recorder.checkpoint_rng.end()
        for entry in recorder.entries.values():
            # remove the check of another optimizer, with which writing failed
            entry.slot.check = None
        slot.check = Trained(optimizer, names).check
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
    """Write the step of torch's own optimizer."""
    optimizers.begin(optimizer)
    groups = optimizer.param_groups
    with recorder.part_of("update"), recorder.writing():
        rates = [_rate(recorder, optimizer, number) for number in range(len(groups))]
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
    """The optimizer's state of a parameter; its slots follow a loaded state_dict."""

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
        # the script loaded the state of an optimizer without steps
        optimizers.begin(optimizer)
        kept = optimizer.state[parameter]
    tensor: Tensor = kept[key]
    return tensor


def _rate(recorder: Recorder, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    name = f"group {number}"
    slot = rate(name, _reading(optimizer, number))
    return recorder.state("rate", name, slot.tensor, slot)


def _reading(optimizer: torch.optim.Optimizer, number: int) -> Callable[[], float]:
    """A function that reads the learning rate and refuses other changes of the group."""
    written = _options(optimizer.param_groups[number])

    def read() -> float:
        # load_state_dict replaces the groups
        group = optimizer.param_groups[number]
        now = _options(group)
        # schedulers add entries to a group
        option = next((o for o in written if now.get(o) != written[o]), None)
        if option is not None:
            raise PlanError(
                f"group {number} of the optimizer: {option} is {now.get(option)!r} and was "
                f"{written[option]!r} when the program was written; only the learning rate of "
                "a program may change, so write it again"
            )
        return float(group["lr"])

    return read


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _FREE}


class Trained:
    """The parameters that an optimizer trained when a program was written."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
        self._optimizer = optimizer
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._identities = [list(map(id, group)) for group in self._groups]
        self._trains = [[p.requires_grad for p in group] for group in self._groups]
        self._names = [[names[id(p)] for p in group] for group in self._groups]

    def check(self) -> None:
        """Refuse to train if the optimizer has changed. Called before each step."""
        groups = self._optimizer.param_groups
        if len(groups) != len(self._groups):
            self._refuse("the optimizer", f"{len(groups)} param groups", str(len(self._groups)))
        for number, group in enumerate(groups):
            now = group["params"]
            if list(map(id, now)) != self._identities[number]:
                self._refuse_group(number, now)
            if [p.requires_grad for p in now] != self._trains[number]:
                self._refuse_frozen(number, now)

    def _refuse_group(self, number: int, now: list[Tensor]) -> None:
        was, place = self._groups[number], f"group {number} of the optimizer"
        if len(now) != len(was):
            self._refuse(place, f"{len(now)} parameters", str(len(was)))
        changed = next(n for n, (p, one) in enumerate(zip(now, was, strict=True)) if p is not one)
        self._refuse(place, f"another parameter at {changed}", self._names[number][changed])

    def _refuse_frozen(self, number: int, now: list[Tensor]) -> None:
        was = zip(self._names[number], now, self._trains[number], strict=True)
        name, parameter = next((name, p) for name, p, trains in was if p.requires_grad != trains)
        now_is, was_it = parameter.requires_grad, not parameter.requires_grad
        self._refuse(f"parameter {name}", f"requires_grad={now_is}", f"requires_grad={was_it}")

    def _refuse(self, place: str, has: str, had: str) -> None:
        raise PlanError(
            f"{place} has {has} and had {had} when the program was written, which would not "
            "train the change; capture or write the program again"
        )
