# SPDX-License-Identifier: Apache-2.0
"""Marks: operations that tag places in a graph; and the memory layout of gradients."""

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


# composite: autograd differentiates through them
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


#: the gradient of a parameter, before the optimizer
GRADIENT = torch.ops.fleetlight.gradient.default
#: the value in training, and the value in an evaluation
UNLESS_TESTING = torch.ops.fleetlight.unless_testing.default
#: a module that reads `training` itself, so that its evaluation is unknown
LOOKS_AT_TRAINING = torch.ops.fleetlight.looks_at_training.default
_MARKS = (GRADIENT, UNLESS_TESTING)


def unless_testing(trained: Tensor, tested: Tensor) -> Tensor:
    """`trained`; an evaluation program uses `tested` instead."""
    out: Tensor = _Through.apply(trained, tested)  # type: ignore[no-untyped-call]
    return out


def without_marks(graph: fx.Graph) -> None:
    """Remove all marks, after the last pass, since they cost time."""
    for node in list(graph.nodes):
        if node.target in _MARKS:
            node.replace_all_uses_with(node.args[0])
        if node.target in _MARKS or node.target is LOOKS_AT_TRAINING:
            graph.erase_node(node)


_library.define("laid_out(Tensor gradient, Tensor parameter) -> Tensor")


def laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with the strides of the parameter: itself, or a copy."""
    if gradient.stride() == parameter.stride():
        return gradient
    if gradient.is_contiguous() and parameter.is_contiguous():
        # they differ in dimensions of size 1
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


_library.impl("laid_out", laid_out, "CompositeExplicitAutograd")

LAID_OUT = torch.ops.fleetlight.laid_out.default


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill the memory without gaps or overlap."""
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return dense
