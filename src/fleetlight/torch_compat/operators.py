# SPDX-License-Identifier: Apache-2.0
"""Operations of torch as objects: their class, their schema, and those with private names.

Why: a program is a graph of these objects. `torch.library` is the public side of the same registry
but has no class to test for. Names such as `aten._to_copy` are what torch itself writes into
exported programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = [
    "BAGS",
    "BAGS_OF_GRADIENTS",
    "BAGS_OF_WEIGHTS",
    "CAST",
    "FOREACH_DIV_SCALAR_",
    "FOREACH_MUL_LIST_",
    "FOREACH_MUL_SCALAR_",
    "FOREACH_MUL_TENSOR_",
    "FOREACH_NORM",
    "FOREACH_UNSCALE_",
    "FOREACH_ZERO_",
    "ITEM",
    "SIZE_FUNCTIONS",
    "UNSAFE_VIEW",
    "OpOverload",
    "direct_function",
    "direct_method",
    "schema",
    "unboxed",
]

_aten = torch.ops.aten
#: `embedding_bag`, with the row of each maximum; then the gradients of its rows and of its weights
BAGS = _aten._embedding_bag.default
BAGS_OF_GRADIENTS = _aten._embedding_bag_dense_backward.default
BAGS_OF_WEIGHTS = _aten._embedding_bag_per_sample_weights_backward.default
CAST = _aten._to_copy.default
UNSAFE_VIEW = _aten._unsafe_view.default
#: `Tensor.item`
ITEM = _aten._local_scalar_dense.default
FOREACH_NORM = _aten._foreach_norm.Scalar
FOREACH_ZERO_ = _aten._foreach_zero_.default
FOREACH_MUL_SCALAR_ = _aten._foreach_mul_.Scalar
FOREACH_MUL_TENSOR_ = _aten._foreach_mul_.Tensor
FOREACH_MUL_LIST_ = _aten._foreach_mul_.ScalarList
FOREACH_DIV_SCALAR_ = _aten._foreach_div_.Scalar
FOREACH_UNSCALE_ = _aten._amp_foreach_non_finite_check_and_unscale_.default
#: functions of open sizes besides Python's operators; one has no public name
SIZE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in ("sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "_sym_sqrt")
}


def schema(operation: Any) -> Any:
    """The schema of an operation: arguments, results, and which of them share memory."""
    return operation._schema


def unboxed(operation: OpOverload) -> Callable[..., Any]:
    """The function inside an operation, which skips the checks of arguments."""
    function: Callable[..., Any] = getattr(operation, "_op", operation)
    return function


def direct_function(name: str) -> Callable[..., Any] | None:
    """The function of torch with this name, which parses its arguments fastest."""
    return getattr(torch._C._VariableFunctions, name, None)


def direct_method(name: str) -> Callable[..., Any] | None:
    """The method of tensors with this name, as in `direct_function`."""
    return getattr(torch._C.TensorBase, name, None)
