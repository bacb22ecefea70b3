# SPDX-License-Identifier: Apache-2.0
"""Marks: operations that find places in a graph again; and the layout of gradients in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_library: Any = torch.library.Library("fleetlight", "DEF")  # type: ignore[no-untyped-call]
_library.define("gradient(Tensor(a) gradient, str name) -> Tensor(a)")
_library.define("looks_at_training(str path) -> ()")
_library.define("unless_testing(Tensor(a) trained, Tensor tested) -> Tensor(a)")


def _gradient(gradient: Tensor, name: str) -> Tensor:
    out: Tensor = torch.ops.aten.alias(gradient)
    return out


def _trained(trained: Tensor, tested: Tensor) -> Tensor:
    out: Tensor = torch.ops.aten.alias(trained)
    return out


def _looks(path: str) -> None:
    pass


# composite: autograd sees through them
_library.impl("gradient", _gradient, "CompositeExplicitAutograd")
_library.impl("looks_at_training", _looks, "CompositeExplicitAutograd")
_library.impl("unless_testing", _trained, "CompositeExplicitAutograd")


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trained: Tensor, tested: Tensor) -> Any:
        return UNLESS_TESTING(trained, tested)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


#: where the gradient of a parameter enters the optimizer
GRADIENT = torch.ops.fleetlight.gradient.default
#: what is computed in training, and what an evaluation computes in its place
UNLESS_TESTING = torch.ops.fleetlight.unless_testing.default
#: where a module goes its own way in training, and nothing says what an evaluation does there
LOOKS_AT_TRAINING = torch.ops.fleetlight.looks_at_training.default
_MARKS = (GRADIENT, UNLESS_TESTING)


def unless_testing(trained: Tensor, tested: Tensor) -> Tensor:
    """`trained`, of which an evaluation program makes `tested`."""
    out: Tensor = _Through.apply(trained, tested)  # type: ignore[no-untyped-call]
    return out


def without_marks(graph: fx.Graph) -> None:
    """Marks cost time; no pass comes after this."""
    for node in list(graph.nodes):
        if node.target in _MARKS:
            node.replace_all_uses_with(node.args[0])
        if node.target in _MARKS or node.target is LOOKS_AT_TRAINING:
            graph.erase_node(node)


_library.define("laid_out(Tensor gradient, Tensor parameter) -> Tensor")


def laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with its numbers in the order of the parameter's: itself, or a copy."""
    if gradient.stride() == parameter.stride():
        return gradient
    if gradient.is_contiguous() and parameter.is_contiguous():
        # they differ in dimensions of size 1
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


_library.impl("laid_out", laid_out, "CompositeExplicitAutograd")

LAID_OUT = torch.ops.fleetlight.laid_out.default


def is_dense(tensor: Tensor) -> bool:
    """Whether the numbers fill the memory from the first to the last, each once."""
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return dense
