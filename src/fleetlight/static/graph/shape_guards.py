# SPDX-License-Identifier: Apache-2.0
"""Which open sizes a program's writer has looked at: it holds for those that look alike."""

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

#: who asks for nobody, and who for somebody else
_STATIC, _TORCH = Path(__file__).parent.parent, str(Path(torch.__file__).parent)
_OURS = (str(_STATIC / "graph"), str(_STATIC / "ops"))
_LAYERS = str(Path(torch.__file__).parent / "nn")
_BETWEEN = ("symbolic_shapes.py", "sym_node.py", "recording.py", "_stats.py", "torch/__init__.py")


def _is_look() -> bool:
    """Whether a user asks by an `if`, or a function of torch that is written as users write.

    And not a kernel of torch, its twin without values, or a pass of ours.
    """
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
    """torch's, which keeps what was asked about sizes: `if len(x) > 4` has one course of the two.

    torch itself asks a lot, and takes courses that are right for all sizes. Its functions that are
    written in Python ask as a user would: batch norm wants more than one record.
    """

    def __init__(self) -> None:
        super().__init__(specialize_zero_one=False, duck_shape=False)
        #: what was found true of sizes
        self.found: dict[Any, None] = {}

    def evaluate_sym_node(self, sym_node: Any, *args: Any, **kwargs: Any) -> Any:
        """The value of something about sizes, for somebody who asks."""
        expression = sym_node.expr
        answer = super().evaluate_sym_node(sym_node, *args, **kwargs)
        if isinstance(answer, (bool, sympy.logic.boolalg.BooleanAtom)) and _is_look():
            self.found[expression if answer else sympy.Not(expression)] = None
        return answer

    def taken(self, feed: Feed, fake: Tensor, is_invented: bool) -> Feed:
        """The feed as the program takes it.

        A size that something looked at has become a constant. That is refused where the sizes were
        invented, since nobody has said that they are these.
        """
        found = [self.limit(size) for size in fake.shape]
        shape = tuple(limit if isinstance(limit, int) else None for limit in found)
        if is_invented and shape != feed.shape:
            dim = next(d for d, size in enumerate(feed.shape) if size != shape[d])
            raise PlanError(
                f"data {feed.name!r}: dimension {dim} may be any, but the program looks at this "
                "size (by len(), int(), or a loop) and would hold for one size only; say which in "
                "static.data, or write it without: x.shape[0] is fine in torch's own functions"
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
        """What a size may be; a number where it is this one only."""
        if not isinstance(size, torch.SymInt):
            return size
        found = self.replace(size.node.expr)
        if not found.free_symbols:
            return int(found)
        limit = Limit()
        for look in self.found:
            look = self.replace(look)
            if look.free_symbols & found.free_symbols:
                bound = _bound(look, found)
                if bound is None:
                    return int(size.node.hint)
                limit = limit.within(bound)
        return limit


def _bound(look: Any, size: Any) -> Limit | None:
    """What a look says about a size alone; None where that is not plain."""
    difference = getattr(look, "lhs", 0) - getattr(look, "rhs", 0)
    if look.free_symbols != {size} or sympy.diff(difference, size).free_symbols:
        return None
    try:
        a, b = sympy.Poly(difference, size).all_coeffs()
    except (sympy.PolynomialError, ValueError):
        return None
    root = -b / a
    kind = look.func if a > 0 else _TURNED.get(look.func, look.func)
    if kind is sympy.Ne:
        return Limit(never=frozenset({int(root)})) if root.is_integer else Limit()
    return _SIDES[kind](root) if kind in _SIDES else None


_TURNED = {sympy.Gt: sympy.Lt, sympy.Lt: sympy.Gt, sympy.Ge: sympy.Le, sympy.Le: sympy.Ge}
_SIDES: dict[Any, Any] = {
    sympy.Gt: lambda root: Limit(least=int(sympy.floor(root)) + 1),
    sympy.Ge: lambda root: Limit(least=int(sympy.ceiling(root))),
    sympy.Lt: lambda root: Limit(most=int(sympy.ceiling(root)) - 1),
    sympy.Le: lambda root: Limit(most=int(sympy.floor(root))),
}
