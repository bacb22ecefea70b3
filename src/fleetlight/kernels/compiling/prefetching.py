# SPDX-License-Identifier: Apache-2.0
"""The prefetch instruction of the processor, for kernels.

A lookup in a large table waits 300 ns for memory. A prefetch some lookups earlier hides that wait.
numba has no function for it, so llvmlite builds the instruction. Where that fails, kernels are
compiled without it and are two to four times slower on large tables.
"""

from __future__ import annotations

from typing import Any

_state: dict[str, Any] = {"wanted": True, "instruction": None, "error": None}


def prefetch(array: Any, at: Any) -> None:
    """Prefetch the cache line of element `at` of a flat array; does nothing in Python."""


def wanted() -> bool:
    """Whether kernels compiled from now on use the instruction."""
    return bool(_state["wanted"])


def give_up(error: BaseException | None = None) -> None:
    """Compile without the instruction from now on."""
    _state.update(wanted=False, error=error)


def instruction() -> Any:
    """The function that replaces `prefetch` in compiled code."""
    if not wanted():
        return _nothing()
    if _state["instruction"] is None:
        _state["instruction"] = _built()
    return _state["instruction"]


def _nothing() -> Any:
    import numba

    return numba.njit(prefetch)


def _built() -> Any:
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    def typed(_context: Any, array: Any, at: Any) -> Any:
        return types.void(array, at), _generate

    def _generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        address = builder.gep(array.data, [args[1]])
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, flag, flag, flag])
        call = builder.module.declare_intrinsic("llvm.prefetch", [address.type], kind)
        # for reading, into all cache levels, data instead of code
        builder.call(call, [address, flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    return intrinsic(typed)
