# SPDX-License-Identifier: Apache-2.0
"""The operations that a program in a file may have, by name.

Without this list a file could call any function.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch

from fleetlight.errors import CheckpointError
from fleetlight.static.ops.marks import GRADIENT, LAID_OUT, LOOKS_AT_TRAINING, UNLESS_TESTING
from fleetlight.static.ops.norms import SYNCED_NORM, SYNCED_NORM_BACKWARD
from fleetlight.static.ops.reductions import REDUCE, REDUCED
from fleetlight.torch_compat.operators import SIZE_FUNCTIONS, OpOverload

#: torch's
NAMESPACES = ("aten", "prims")
#: Fleetlight's own; files have no operations of tables
_OURS = (
    *(GRADIENT, LOOKS_AT_TRAINING, UNLESS_TESTING, LAID_OUT, REDUCE, REDUCED),
    *(SYNCED_NORM, SYNCED_NORM_BACKWARD),
)
#: operations of torch that open files
_REFUSED = frozenset({"aten.from_file.default", "aten.from_file.out"})
_OPERATORS = (
    *("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "pos", "abs"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "lshift", "rshift"),
)
_MATHS = ("ceil", "floor", "trunc")
#: functions on sizes, and Fleetlight's own operations
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS},
    **{f"math.{name}": getattr(math, name) for name in _MATHS},
    **{f"torch.{name}": function for name, function in SIZE_FUNCTIONS.items()},
    "builtins.round": round,
    **{str(target): target for target in _OURS},
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}


def name_of(target: Any) -> str:
    """`aten.mm.default`, `operator.getitem`: how a file names an operation."""
    if target in _NAMES:
        return _NAMES[target]
    if not isinstance(target, OpOverload):
        raise CheckpointError(_refusal(getattr(target, "__name__", str(target))))
    name = str(target)
    if target.namespace not in NAMESPACES or name in _REFUSED:
        raise CheckpointError(_refusal(name))
    return name


def operation(name: str) -> Callable[..., Any]:
    """The operation of a name."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, *rest = name.split(".")
    if namespace not in NAMESPACES or len(rest) != 2 or name in _REFUSED:
        raise CheckpointError(_refusal(name))
    packet = getattr(getattr(torch.ops, namespace), rest[0], None)
    found = getattr(packet, rest[1], None)
    if not isinstance(found, OpOverload) or str(found) != name:
        raise CheckpointError(
            f"the operation {name!r} is unknown to torch {torch.__version__} and this Fleetlight; "
            "load it with the versions that saved it"
        )
    return found


def _refusal(name: str) -> str:
    return (
        f"a program in a file may not have the operation {name!r}; expected one of torch "
        f"({', '.join(NAMESPACES)}), or {', '.join(_FUNCTIONS)}"
    )
