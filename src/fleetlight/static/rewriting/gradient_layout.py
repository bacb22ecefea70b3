# SPDX-License-Identifier: Apache-2.0
"""Gradients as rows of numbers and back, in the order in which they lie in memory.

In any other order the numbers of a transposed gradient would have to be copied.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import SymInt, Tensor, fx

from fleetlight.static.rewriting.nodes import NodeWriter

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class GradientLayout:
    """How the numbers of a gradient lie in memory."""

    shape: tuple[int, ...]
    #: its dimensions, that of the largest steps first
    order: tuple[int, ...]
    #: whether they fill the memory from the first to the last, each once
    dense: bool = True

    @classmethod
    def of(cls, gradient: Tensor) -> GradientLayout:
        """What is not dense, such as one number expanded to many, will be laid out by its shape."""
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
        """The numbers in a row: a view, unless they are not dense."""
        row = gradient
        if not self.dense:
            row = pen.write(_aten.clone.default, row, memory_format=torch.contiguous_format)
        if not self._is_straight:
            row = pen.write(_aten.permute.default, row, list(self.order))
        if len(self.shape) != 1:
            # right, though a copy, where memory is in another order than was foreseen
            row = pen.write(_aten.reshape.default, row, [-1])
        return row

    def shaped(self, pen: NodeWriter, row: fx.Node) -> fx.Node:
        """A view of a row, in the shape of the gradient."""
        if len(self.shape) != 1:
            row = pen.write(_aten.view.default, row, [self.shape[dim] for dim in self.order])
        if not self._is_straight:
            back = sorted(range(len(self.order)), key=lambda dim: self.order[dim])
            row = pen.write(_aten.permute.default, row, back)
        return row
