# SPDX-License-Identifier: Apache-2.0
"""`capture`: an ordinary module, a loss and an optimizer as one `Program`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from fleetlight.errors import PlanError
from fleetlight.static import optimizers
from fleetlight.static.feeds import Feed
from fleetlight.static.program import Program
from fleetlight.static.state import Slot, rate
from fleetlight.static.tracing import GRADIENT, trace

Fetches = Mapping[str, Callable[..., Tensor]]


def capture(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    example_inputs: Mapping[str, Tensor],
    fetches: Fetches | None = None,
) -> Program:
    """A training step as a program.

    Inputs named like arguments of the model's forward go there, or else the first of them; the
    others follow the model's output into `loss_fn` and into each function of `fetches`. The first
    dimension of every input is the batch, of any size.
    """
    optimizers.check(optimizer)
    optimizers.begin(optimizer)
    step = _Step(model, loss_fn, optimizer, list(example_inputs), dict(fetches or {}))
    feeds = [
        (Feed(name, (None, *value.shape[1:]) if value.dim() else (), value.dtype), value)
        for name, value in example_inputs.items()
    ]
    graph, taken = trace(step, [slot.tensor for slot in step.slots], feeds)
    return Program(graph, step.slots, {feed.name: feed for feed in taken}, step.names)


class _Step:
    """Forward, loss, backward and step on tensors given from outside, in the order of the slots."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        inputs: list[str],
        fetches: dict[str, Callable[..., Tensor]],
    ) -> None:
        self._model, self._loss_fn, self._optimizer = model, loss_fn, optimizer
        self._inputs, self._fetches = inputs, fetches
        self._to_model = _inputs_of(model, inputs)
        self._parameters = dict(model.named_parameters())
        self._buffers = dict(model.named_buffers())
        names: dict[Tensor, str] = {p: name for name, p in self._parameters.items()}
        self._groups = [_named(names, group["params"]) for group in optimizer.param_groups]
        self.slots = [
            *(Slot("parameter", n, p) for n, p in self._parameters.items()),
            *(Slot("buffer", n, b) for n, b in self._buffers.items()),
            *self._optimizer_slots(),
            *(rate(f"group {i}", _rate_of(g)) for i, g in enumerate(optimizer.param_groups)),
        ]
        self.names = ["loss", "output", *fetches]

    def _trained(self) -> list[str]:
        return [
            name for group in self._groups for name in group if self._parameters[name].requires_grad
        ]

    def _optimizer_slots(self) -> list[Slot]:
        return [
            Slot("optimizer", f"{name}.{key}", value)
            for name in self._trained()
            for key, value in self._optimizer.state.get(self._parameters[name], {}).items()
            if isinstance(value, Tensor)
        ]

    def __call__(self, *values: Tensor) -> list[Tensor]:
        given = dict(zip([(s.kind, s.name) for s in self.slots], values, strict=False))
        feeds = dict(zip(self._inputs, values[len(self.slots) :], strict=True))
        parameters = {name: given["parameter", name] for name in self._parameters}
        buffers = {name: given["buffer", name] for name in self._buffers}
        with _reparametrize_module(self._model, {**parameters, **buffers}):
            output = self._model(*(feeds[name] for name in self._to_model))
        rest = [value for name, value in feeds.items() if name not in self._to_model]
        loss = self._loss_fn(output, *rest)
        found = [function(output, *rest).detach() for function in self._fetches.values()]
        self._train(loss, parameters, given)
        return [loss.detach(), output.detach(), *found]

    def _train(
        self, loss: Tensor, parameters: dict[str, Tensor], given: dict[tuple[Any, str], Tensor]
    ) -> None:
        trained = self._trained()
        gradients = torch.autograd.grad(
            loss, [parameters[name] for name in trained], allow_unused=True
        )
        entering = {
            parameters[name]: GRADIENT(gradient, name)
            for name, gradient in zip(trained, gradients, strict=True)
            if gradient is not None
        }
        states = {
            parameters[name]: {
                key: given.get(("optimizer", f"{name}.{key}"), value)
                for key, value in self._optimizer.state.get(self._parameters[name], {}).items()
            }
            for name in trained
        }
        groups = [[parameters[name] for name in group] for group in self._groups]
        rates = [given["rate", f"group {i}"] for i in range(len(groups))]
        optimizers.step(self._optimizer, groups, entering, states, rates)


def _inputs_of(model: nn.Module, inputs: list[str]) -> list[str]:
    """The inputs that the model takes."""
    takes = inspect.signature(model.forward).parameters.values()
    named = [p.name for p in takes if p.name in inputs]
    needed = [p for p in takes if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return named if len(named) >= len(needed) > 0 else inputs[: max(1, len(needed))]


def _named(names: dict[Tensor, str], parameters: list[Tensor]) -> list[str]:
    missing = [p for p in parameters if p not in names]
    if missing:
        raise PlanError(
            f"the optimizer has a parameter of shape {list(missing[0].shape)} that is not one of "
            "the model's; capture the model whose parameters it steps"
        )
    return [names[parameter] for parameter in parameters]


def _rate_of(group: dict[str, Any]) -> Callable[[], float]:
    return lambda: float(group["lr"])
