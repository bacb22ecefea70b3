# SPDX-License-Identifier: Apache-2.0
"""The fastest callable of each operation: the boxed form costs a small net up to a third more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleetlight.static.ops.marks import LAID_OUT, laid_out
from fleetlight.torch_compat.operators import OpOverload, direct_function, direct_method, unboxed

#: operations that torch has as functions of the same arguments, which parse these faster
_FUNCTIONS = {
    *("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_log_softmax"),
    *("_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "abs", "add", "addmm"),
    *("amax", "argmax", "as_strided", "baddbmm", "bmm", "cat", "clone", "convolution", "cumsum"),
    *("detach", "div", "embedding", "empty_like", "eq", "exp", "ge", "gt", "index_select", "le"),
    *("log", "lt", "mean", "mm", "mul", "native_batch_norm", "native_dropout"),
    *("native_layer_norm", "ne", "neg", "ones_like", "permute", "pow", "relu", "relu_", "rsqrt"),
    *("select", "sigmoid", "split_with_sizes", "sqrt", "squeeze", "stack", "sub", "sum", "t"),
    *("tanh", "transpose", "unsqueeze", "where", "zeros_like"),
}
#: operations that torch has as methods of tensors
_METHODS = {"add_", "copy_", "div_", "expand", "mul_", "view"}


def callable_of(target: Any) -> Callable[..., Any]:
    """The callable for a node's target."""
    if target is LAID_OUT:
        return laid_out
    function: Callable[..., Any] = target
    if isinstance(target, OpOverload):
        name = target.overloadpacket.__name__
        direct = None
        if target.namespace == "aten" and (name in _FUNCTIONS or name.startswith("_foreach_")):
            direct = direct_function(name)
        elif target.namespace == "aten" and name in _METHODS:
            direct = direct_method(name)
        function = direct or unboxed(target)
    return function
