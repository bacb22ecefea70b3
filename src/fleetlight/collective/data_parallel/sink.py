# SPDX-License-Identifier: Apache-2.0
"""Autograd nodes around a model's forward, through which the gradients of its outputs pass.

They scale gradients where a batch counts for more or less than usual. Gradients that leave the
model through its inputs are scaled back, since the model before it scales on its own. The nodes
also make backward visit each output. With `find_unused_parameters`, torch's reducer waits for the
gradients of all parameters that an output reaches. An output that the loss ignores would send none;
through the node it sends an undefined gradient, which the reducer accepts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fleetlight.torch_compat.tensors import tree_flatten, tree_unflatten


class _Sink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, factor: float, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.factor = factor
        # no views: torch refuses to change those in place
        return tuple(output.clone() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.factor == 1.0:
            return (None, *gradients)
        return (None, *(g if g is None else _Times.apply(ctx.factor, g) for g in gradients))  # type: ignore[no-untyped-call]


class _Times(torch.autograd.Function):
    """Multiplies a gradient that enters or leaves a model by a factor.

    A gradient penalty differentiates through this node. Its gradients pass in the other direction
    and are scaled inside the model already, so the node leaves them as they are.
    """

    @staticmethod
    def forward(ctx: Any, factor: float, gradient: Tensor) -> Tensor:
        return gradient * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def weighted(forward: Callable[..., Any], args: Any, kwargs: Any, factor: float) -> Any:
    """Call a forward with gradients inside `factor` times as large as outside."""
    if factor == 1.0:
        return forward(*args, **kwargs)
    if factor:
        args = [through_sink(value, 1 / factor) for value in args]
        kwargs = {name: through_sink(value, 1 / factor) for name, value in kwargs.items()}
    return through_sink(forward(*args, **kwargs), factor)


def outputs_of(output: Any) -> list[Tensor]:
    """The tensors in the output of a forward."""
    return [leaf for leaf in _flatten(output)[0] if isinstance(leaf, Tensor)]


def through_sink(output: Any, factor: float = 1.0) -> Any:
    """Pass the tensors of an output that require gradients through one scaling node."""
    leaves, rebuild = _flatten(output)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not where:
        return output
    through = _Sink.apply(factor, *(leaves[i] for i in where))  # type: ignore[no-untyped-call]
    for i, tensor in zip(where, through, strict=True):
        leaves[i] = tensor
    return rebuild(leaves)


def _flatten(output: Any) -> tuple[list[Any], Any]:
    """The leaves of containers and of a dataclass, and a function that rebuilds them."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        names = [field.name for field in dataclasses.fields(output)]
        leaves, spec = tree_flatten([getattr(output, name) for name in names])

        def rebuild(changed: list[Any]) -> Any:
            values = tree_unflatten(changed, spec)
            return dataclasses.replace(output, **dict(zip(names, values, strict=True)))

        return leaves, rebuild
    leaves, spec = tree_flatten(output)
    return leaves, lambda changed: tree_unflatten(changed, spec)
