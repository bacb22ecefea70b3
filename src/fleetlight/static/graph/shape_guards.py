# SPDX-License-Identifier: Apache-2.0
"""Guards on dynamic sizes: a program is valid for sizes that take the recorded branches."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import sympy
import torch
from torch import Tensor

from fleetlight.errors import PlanError
from fleetlight.static.graph.feeds import FREE, Feed, Limit
from fleetlight.torch_compat.fakes import ShapeEnv

#: files whose own branches add no guard, and files that only pass a branch on
_STATIC, _TORCH = Path(__file__).parent.parent, str(Path(torch.__file__).parent)
_OURS = (str(_STATIC / "graph"), str(_STATIC / "ops"))
_LAYERS = str(Path(torch.__file__).parent / "nn")
_BETWEEN = ("symbolic_shapes.py", "sym_node.py", "recording.py", "_stats.py", "torch/__init__.py")


def _is_user_branch() -> bool:
    """Whether the branch is in user code or in torch.nn, rather than in a kernel, fake or pass."""
    frame: FrameType | None = sys._getframe(2)
    by_python = False
    while frame is not None and frame.f_code.co_filename.endswith(_BETWEEN):
        by_python = by_python or frame.f_code.co_name == "__bool__"
        frame = frame.f_back
    if frame is None or not by_python:
        return False
    file = frame.f_code.co_filename
    return file.startswith(_LAYERS) or not file.startswith((_TORCH, *_OURS))


class Shapes(ShapeEnv):
    """A ShapeEnv that records user branches on sizes: of `if len(x) > 4` it keeps one.

    torch's kernels branch often, in ways that are right for all sizes. Its Python functions branch
    like user code: batch norm needs more than one record.
    """

    def __init__(self) -> None:
        super().__init__(specialize_zero_one=False, duck_shape=False)
        #: conditions that held, in order
        self.found: dict[Any, None] = {}

    def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
        """The value of a symbolic condition; a user branch on it adds a guard."""
        expression = sym_node.expr
        answer = super().evaluate_sym_node(sym_node, *args, **kwargs)
        if isinstance(answer, (bool, sympy.logic.boolalg.BooleanAtom)) and _is_user_branch():
            self.found[expression if answer else sympy.Not(expression)] = None
        return answer

    def constrained(self, feed: Feed, fake: Tensor, is_invented: bool) -> Feed:
        """The feed with the limits of its sizes.

        A size that became a constant is an error if `static.data` invented it.
        """
        found = [self.limit(size) for size in fake.shape]
        shape = tuple(limit if isinstance(limit, int) else None for limit in found)
        if is_invented and shape != feed.shape:
            dim = next(d for d, size in enumerate(feed.shape) if size != shape[d])
            raise PlanError(
                f"data {feed.name!r}: dimension {dim} is dynamic, but the program reads this "
                "size (by len(), int(), or a loop) and would be valid for one size only; give it "
                "in static.data, or avoid reading it: torch's own functions accept x.shape[0]"
            )
        return dataclasses.replace(
            feed,
            shape=shape,
            ties=tuple(self._tie(size) for size in fake.shape),
            limits=tuple(FREE if isinstance(limit, int) else limit for limit in found),
        )

    def _tie(self, size: int | torch.SymInt) -> str | None:
        if isinstance(self.limit(size), int) or isinstance(size, int):
            return None
        return str(self.replace(size.node.expr))

    def limit(self, size: int | torch.SymInt) -> Limit | int:
        """The limit of a size, or its only value."""
        if not isinstance(size, torch.SymInt):
            return size
        found = self.replace(size.node.expr)
        if not found.free_symbols:
            return int(found)
        limit = Limit()
        for guard in self.found:
            guard = self.replace(guard)
            if guard.free_symbols & found.free_symbols:
                bound = _bound(guard, found)
                if bound is None:
                    return int(size.node.hint)
                limit = limit.within(bound)
        return limit


def _bound(guard: Any, size: Any) -> Limit | None:
    """The limit of a size by one guard; None if the guard is not linear in this size alone."""
    difference = getattr(guard, "lhs", 0) - getattr(guard, "rhs", 0)
    if guard.free_symbols != {size} or sympy.diff(difference, size).free_symbols:
        return None
    try:
        a, b = sympy.Poly(difference, size).all_coeffs()
    except (sympy.PolynomialError, ValueError):
        return None
    root = -b / a
    kind = guard.func if a > 0 else _FLIPPED.get(guard.func, guard.func)
    if kind is sympy.Ne:
        return Limit(never=frozenset({int(root)})) if root.is_integer else Limit()
    return _SIDES[kind](root) if kind in _SIDES else None


_FLIPPED = {sympy.Gt: sympy.Lt, sympy.Lt: sympy.Gt, sympy.Ge: sympy.Le, sympy.Le: sympy.Ge}
_SIDES: dict[Any, Any] = {
    sympy.Gt: lambda root: Limit(least=int(sympy.floor(root)) + 1),
    sympy.Ge: lambda root: Limit(least=int(sympy.ceiling(root))),
    sympy.Lt: lambda root: Limit(most=int(sympy.ceiling(root)) - 1),
    sympy.Le: lambda root: Limit(most=int(sympy.floor(root))),
}
