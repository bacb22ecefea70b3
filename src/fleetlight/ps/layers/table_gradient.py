# SPDX-License-Identifier: Apache-2.0
"""`TableGradient`: the value of `weight.grad` for a layer whose rows are on servers.

A table's `weight` has no elements; its gradient contains the rows that backward reached. It is a
tensor, so torch's operations on gradients work: gradients accumulate over backwards, `zero_grad`
clears them, a loss scaler unscales them and finds infinities, `clip_grad_norm_` measures and scales
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.errors import PlanError
from fleetlight.kernels import all_finite, dedup, sum_by
from fleetlight.ps.update import TableGradients
from fleetlight.torch_compat import operators as op
from fleetlight.torch_compat.tensors import wrapper

_aten = torch.ops.aten
Part = TableGradients


class TableGradient(Tensor):
    """A tensor of the weight's shape; `parts` are rows, each part with distinct ids."""

    parts: list[Part]
    #: True when it was scaled in place after its norm was taken, as clip_grad_norm_ does
    is_clipped = False
    _is_measured = False

    @staticmethod
    def __new__(cls, like: Tensor, parts: list[Part]) -> TableGradient:
        made = wrapper(cls, like.shape, dtype=like.dtype, device=like.device)
        made.parts = parts
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        operation = _OPERATIONS.get(func)
        if operation is None:
            raise PlanError(
                f"{func} was called on the gradient of a table, whose rows are on the servers; "
                "supported are addition, scaling, zeroing, norms and loss scalers"
            )
        return operation(func, *args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TableGradient({sum(len(part.ids) for part in self.parts)} rows)"

    def merged(self, servers: int) -> Part | None:
        """Merge all parts into one with distinct ids; None when backward reached no row."""
        return as_one(self.parts, servers)

    def scale(self, factor: float) -> None:
        """Multiply all rows."""
        for part in self.parts:
            part.gradients *= np.float32(factor)

    def measure(self, order: float) -> float:
        """The norm after summing the rows of each id."""
        self._is_measured = True
        return norm(self, order)

    def scale_in_place(self, factor: float) -> None:
        """Scale in place on behalf of the script."""
        self.is_clipped |= self._is_measured and factor != 1.0
        self.scale(factor)

    def is_finite(self) -> bool:
        """False when any row holds a NaN or an infinity."""
        return all(all_finite(part.gradients) for part in self.parts)


def as_one(parts: Sequence[Part], servers: int) -> Part | None:
    """Merge parts into one with distinct ids; None when they have no row."""
    filled = [part for part in parts if len(part.ids)]
    if len(filled) <= 1:
        return filled[0] if filled else None
    return merge(filled, servers)


def merge(parts: Sequence[Part], servers: int) -> Part:
    """Sum the gradients, shows and clicks of each id."""
    ids = np.concatenate([part.ids for part in parts])
    found = dedup(ids, servers)
    count = len(found.ids)

    def summed(columns: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        return sum_by(np.concatenate(columns), found.inverse, count)

    def counted(columns: list[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
        if any(column is None for column in columns):
            return None
        return summed([column[:, None] for column in columns if column is not None])[:, 0]

    return TableGradients(
        ids=found.ids,
        starts=found.starts,
        gradients=summed([part.gradients for part in parts]),
        shows=counted([part.shows for part in parts]),
        clicks=counted([part.clicks for part in parts]),
    )


def norm(gradient: TableGradient, order: float) -> float:
    """The norm over all rows, after summing the rows of each id."""
    part = gradient.merged(1)
    if part is None:
        return 0.0
    values = np.abs(part.gradients.astype(np.float64))
    return float(
        values.max(initial=0) if math.isinf(order) else (values**order).sum() ** (1 / order)
    )


def _same(gradient: TableGradient) -> Tensor:
    return torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device)


def _alias(_: Any, gradient: TableGradient, **__: Any) -> TableGradient:
    return TableGradient(_same(gradient), gradient.parts)


def _clone(_: Any, gradient: TableGradient, **__: Any) -> TableGradient:
    parts = [_copied(part) for part in gradient.parts]
    return TableGradient(_same(gradient), parts)


def _copied(part: Part) -> Part:
    return TableGradients(part.ids, part.starts, part.gradients.copy(), part.shows, part.clicks)


def _add(_: Any, mine: TableGradient, other: TableGradient, **__: Any) -> TableGradient:
    return TableGradient(_same(mine), [*mine.parts, *other.parts])


def _add_(_: Any, mine: TableGradient, other: Any, **__: Any) -> TableGradient:
    if isinstance(other, TableGradient):
        mine.parts.extend(other.parts)
    return mine


def _zero_(_: Any, gradient: TableGradient) -> TableGradient:
    gradient.parts.clear()
    return gradient


def _mul(_: Any, gradient: TableGradient, factor: Any) -> TableGradient:
    copy = _clone(None, gradient)
    copy.scale(float(factor))
    return copy


def _mul_(_: Any, gradient: TableGradient, factor: Any) -> TableGradient:
    gradient.scale_in_place(float(factor))
    return gradient


def _div_(_: Any, gradient: TableGradient, divisor: Any) -> TableGradient:
    gradient.scale(1.0 / float(divisor))
    return gradient


def _vector_norm(
    func: Any, gradient: TableGradient, order: float = 2.0, *_: Any, **__: Any
) -> Tensor:
    return torch.tensor(gradient.measure(float(order)), device=gradient.device)


def _each(one: Callable[..., Any]) -> Callable[..., Any]:
    """Apply an operation to each gradient of a list with some table gradients."""

    def operation(func: Any, gradients: list[Tensor], *args: Any, **kwargs: Any) -> Any:
        answers = []
        for position, gradient in enumerate(gradients):
            mine = [a[position] if isinstance(a, (list, tuple)) else a for a in args]
            if isinstance(gradient, TableGradient):
                answers.append(one(func, gradient, *mine, **kwargs))
            else:
                lists = [
                    [m] if isinstance(a, (list, tuple)) else a
                    for a, m in zip(args, mine, strict=True)
                ]
                answer = func([gradient], *lists, **kwargs)
                answers.append(answer[0] if answer else None)
        return None if all(answer is None for answer in answers) else answers

    return operation


def _in_place(one: Callable[..., Any]) -> Callable[..., Any]:
    each = _each(one)

    def operation(*args: Any, **kwargs: Any) -> None:
        each(*args, **kwargs)

    return operation


def _unscale(func: Any, gradients: list[Tensor], found: Tensor, inverse: Tensor) -> None:
    plain = [g for g in gradients if not isinstance(g, TableGradient)]
    if plain:
        func(plain, found, inverse)
    for gradient in gradients:
        if isinstance(gradient, TableGradient):
            if not gradient.is_finite():
                found.fill_(1.0)
            gradient.scale(float(inverse))


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _alias,
    _aten.alias.default: _alias,
    _aten.view.default: lambda func, gradient, size: gradient,
    _aten.clone.default: _clone,
    _aten.add.Tensor: _add,
    _aten.add_.Tensor: _add_,
    _aten.zero_.default: _zero_,
    _aten.mul.Tensor: _mul,
    _aten.mul.Scalar: _mul,
    _aten.mul_.Tensor: _mul_,
    _aten.mul_.Scalar: _mul_,
    _aten.div_.Tensor: _div_,
    _aten.div_.Scalar: _div_,
    _aten.linalg_vector_norm.default: _vector_norm,
    op.FOREACH_NORM: _each(_vector_norm),
    op.FOREACH_ZERO_: _in_place(_zero_),
    op.FOREACH_MUL_SCALAR_: _in_place(_mul_),
    op.FOREACH_MUL_TENSOR_: _in_place(_mul_),
    op.FOREACH_MUL_LIST_: _in_place(_mul_),
    op.FOREACH_DIV_SCALAR_: _in_place(_div_),
    op.FOREACH_UNSCALE_: _unscale,
}
