# SPDX-License-Identifier: Apache-2.0
"""Gradients as flat rows and back, in memory order.

In any other order a transposed gradient would need a copy.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import SymInt, Tensor, fx

from fleetlight.static.rewriting.nodes import NodeWriter

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class GradientLayout:
    """The memory layout of a gradient."""

    shape: tuple[int, ...]
    #: its dimensions by decreasing stride
    order: tuple[int, ...]
    #: whether the elements fill the memory without gaps or overlap
    dense: bool = True

    @classmethod
    def of(cls, gradient: Tensor) -> GradientLayout:
        """The layout of a gradient; a gradient that is not dense, such as expanded, has none."""
        shape, straight = tuple(gradient.shape), tuple(range(gradient.dim()))
        if any(isinstance(step, SymInt) for step in gradient.stride()):
            return cls(shape, straight, dense=False)
        if gradient.is_contiguous():
            return cls(shape, straight)
        steps = gradient.stride()
        order = tuple(sorted(straight, key=lambda dim: -steps[dim]))
        if gradient.permute(order).is_contiguous():
            return cls(shape, order)
        return cls(shape, straight, dense=False)

    @property
    def _is_straight(self) -> bool:
        return list(self.order) == sorted(self.order)

    def flat(self, pen: NodeWriter, gradient: fx.Node) -> fx.Node:
        """The gradient as a flat row: a view if it is dense."""
        row = gradient
        if not self.dense:
            row = pen.write(_aten.clone.default, row, memory_format=torch.contiguous_format)
        if not self._is_straight:
            row = pen.write(_aten.permute.default, row, list(self.order))
        if len(self.shape) != 1:
            # copies if the memory has another order than expected
            row = pen.write(_aten.reshape.default, row, [-1])
        return row

    def shaped(self, pen: NodeWriter, row: fx.Node) -> fx.Node:
        """A view of a row in the shape of the gradient."""
        if len(self.shape) != 1:
            row = pen.write(_aten.view.default, row, [self.shape[dim] for dim in self.order])
        if not self._is_straight:
            back = sorted(range(len(self.order)), key=lambda dim: self.order[dim])
            row = pen.write(_aten.permute.default, row, back)
        return row
