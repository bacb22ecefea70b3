# SPDX-License-Identifier: Apache-2.0
"""`capture`: an ordinary module, a loss and an optimizer as one `Program`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fleetlight.errors import ConfigError, names_arguments
from fleetlight.static.definition import train
from fleetlight.static.graph.feeds import Feed
from fleetlight.static.graph.variable import Variable
from fleetlight.static.passes.split_ps import SplitPS
from fleetlight.static.program import Program
from fleetlight.static.running.runners import ReadOnlyRunner
from fleetlight.static.writing import optimizers
from fleetlight.static.writing.calls import watched
from fleetlight.static.writing.clipping import Clip
from fleetlight.static.writing.source import ProgramSource, no_gc

Fetches = Mapping[str, Callable[..., Tensor]]


@no_gc()
@names_arguments
def capture(
    model: nn.Module,
    loss_fn: Callable[..., Tensor] | None,
    optimizer: torch.optim.Optimizer | None,
    example_inputs: Mapping[str, Tensor],
    fetches: Fetches | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> Program:
    """Capture a training step as a program; without an optimizer, a forward.

    Inputs named like arguments of the model's forward go there; without such names the first
    inputs do. The others follow the model's output into `loss_fn` and into each function of
    `fetches`. The first dimension of every input is the batch and may have any size.

    Args:
        model: the module to call.
        loss_fn: computes the loss from the output and the other inputs.
        optimizer: an optimizer of the model's parameters, registered or not.
        example_inputs: tensors by name.
        fetches: more functions of the output and the other inputs, by name.
        clip_norm: the largest norm of the gradients of all workers together.
        clip_value: the largest absolute value of a gradient.

    Returns:
        A `Program`, for `Executor.run`.

    Raises:
        ConfigError: an argument is wrong.
        PlanError: the step cannot be captured; the message names the operation.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> inputs = {"x": torch.zeros(2, 4), "y": torch.zeros(2, 1)}
        >>> program = fleet.static.capture(model, nn.functional.mse_loss, optimizer, inputs)
        >>> list(program.feeds)
        ['x', 'y']
    """
    clip = Clip(clip_norm, clip_value)
    if not isinstance(example_inputs, Mapping):
        raise ConfigError(
            f"capture: example_inputs is a {type(example_inputs).__name__}, expected a mapping of "
            'names to tensors, such as {"x": x, "y": y}: programs are fed by these names'
        )
    if optimizer is not None:
        optimizers.check(optimizer)
        if loss_fn is None:
            raise ConfigError("capture: an optimizer without loss_fn has nothing to minimize")
    program = Program()
    program.mark_started()
    source = program.writable_source()
    feeds = {name: _feed(source, name, value) for name, value in example_inputs.items()}
    to_model = _inputs_of(model, list(feeds))
    rest = [value for name, value in feeds.items() if name not in to_model]
    output = source.modules.call(model, lambda: _called(model, to_model, feeds))
    functions = {**({} if loss_fn is None else {"loss": loss_fn}), **(fetches or {})}
    found = {
        name: _computed(source, function, output, rest) for name, function in functions.items()
    }
    for name, value in _named(output):
        source.recorder.names[name] = source.recorder.node_of(value)
    for name, value in found.items():
        source.recorder.names[name] = _node(source, name, value)
    program.model = model
    if optimizer is not None:
        train(program, found["loss"], model, optimizer, clip)
    elif source.recorder.lookups:
        program.passes, program.runner = (SplitPS(),), ReadOnlyRunner()
    return program


def _named(output: Any) -> Iterator[tuple[str, Variable]]:
    """The outputs of a model: `output`, or the keys of a dict, or `output_0`, `output_1`."""
    if isinstance(output, Mapping):
        parts = {str(key): value for key, value in output.items()}
    elif isinstance(output, (list, tuple)):
        parts = {f"output_{number}": value for number, value in enumerate(output)}
    else:
        parts = {"output": output}
    yield from ((name, value) for name, value in parts.items() if isinstance(value, Variable))


def _computed(
    source: ProgramSource, function: Callable[..., Any], output: Any, rest: list[Any]
) -> Any:
    with watched(), source.recorder.writing():
        return function(output, *rest)


def _feed(source: ProgramSource, name: str, value: Tensor) -> Variable:
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"capture: example input {name!r} is a {type(value).__name__}, expected a tensor"
        )
    shape = (None, *value.shape[1:]) if value.dim() else ()
    return source.recorder.feed(Feed(name, shape, value.dtype), value)


def _node(source: ProgramSource, name: str, value: Any) -> torch.fx.Node:
    if not isinstance(value, Variable):
        raise ConfigError(
            f"capture: {name} is a {type(value).__name__} that does not depend on the inputs, "
            "expected a tensor computed from them"
        )
    return source.recorder.node_of(value)


def _inputs_of(model: nn.Module, inputs: list[str]) -> list[str]:
    """The inputs that the model takes."""
    takes = inspect.signature(model.forward).parameters.values()
    named = [p.name for p in takes if p.name in inputs]
    needed = [p for p in takes if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return named if len(named) >= len(needed) > 0 else inputs[: max(1, len(needed))]


def _called(model: nn.Module, to_model: list[str], feeds: Mapping[str, Variable]) -> Any:
    """Call the model with named arguments if it has them, else with positional ones."""
    takes = inspect.signature(model.forward).parameters
    if all(name in takes for name in to_model):
        return model(**{name: feeds[name] for name in to_model})
    return model(*(feeds[name] for name in to_model))
