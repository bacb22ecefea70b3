# SPDX-License-Identifier: Apache-2.0
"""Tensors without values, and sizes without numbers: `torch._subclasses` and `symbolic_shapes`.

Why: a capture calls the model once with tensors that have only shapes, some of them open.
torch.export does so in private; its public side takes one module, and no script that calls several
of them.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode, fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, UnsupportedOperatorException
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._sympy.printers import PythonPrinter

__all__ = [
    "ASKS_FOR_VALUES",
    "TRACES",
    "FakeTensor",
    "FakeTensorMode",
    "ShapeEnv",
    "UnsupportedOperatorException",
    "as_python",
    "check",
    "fakes_of",
    "hint",
    "open_fake",
]

#: the errors of torch where an operation depends on values of tensors without any
ASKS_FOR_VALUES = (GuardOnDataDependentSymNode, DataDependentOutputException)
#: the logger to which torch writes a traceback before such an error
TRACES = logging.getLogger(fake_tensor.__name__)


def fakes_of(shapes: ShapeEnv) -> FakeTensorMode:
    """A mode that makes tensors without values; live ones may take part."""
    return FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)


def open_fake(fakes: FakeTensorMode, example: Tensor, is_open: list[bool]) -> Any:
    """A tensor like the example, with sizes that have no number."""
    kinds = [DimDynamic.DYNAMIC if one else DimDynamic.STATIC for one in is_open]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
    return fakes.from_tensor(example, symbolic_context=context)


def as_python(expression: Any) -> str:
    """An expression of sizes as Python source, which may use `math`."""
    return str(PythonPrinter().doprint(expression))


def check(condition: Any) -> None:
    """Assume a fact about open sizes; `torch._check` is documented."""
    torch._check(condition)  # type: ignore[no-untyped-call]


def hint(size: int | torch.SymInt) -> int:
    """The number of an open size in the example."""
    known = getattr(symbolic_shapes, "guarding_hint_or_throw", None)
    if known is not None:
        return int(known(size))
    # torch 2.9 and 2.10
    return size if isinstance(size, int) else int(size.node.require_hint())
