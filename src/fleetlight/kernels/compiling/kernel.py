# SPDX-License-Identifier: Apache-2.0
"""Compiles each kernel with numba when it is first called.

numba has no type hints and takes half a second to import, so only this package imports it. The
annotations of a kernel are its signature, the only one that numba compiles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar, cast

from fleetlight.kernels import arrays
from fleetlight.kernels.compiling import compiled_files, prefetching

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

# No fastmath: first values must not depend on how the compiler groups additions.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
_lock = threading.RLock()
_parts: set[Callable[..., Any]] = set()
#: by function, and whether it prefetches
_compiled: dict[tuple[Callable[..., Any], bool], Any] = {}


def part(function: F) -> F:
    """Decorates a function that kernels call; numba compiles it together with each of them."""
    _parts.add(function)
    return function


class Kernel(Generic[P, R]):
    """A function that numba compiles when it is first called."""

    def __init__(self, function: Callable[P, R], name: str, bound: dict[str, Any]) -> None:
        """`bound` has parts that replace global names of the function."""
        self._function = cast(FunctionType, function)
        self._name = name
        self._bound = bound
        self._ready: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return (self._ready or self._build())(*args, **kwargs)

    def variant(self, name: str, **bound: Callable[..., Any]) -> Kernel[P, R]:
        """This kernel with other parts, under the name `name`."""
        return Kernel(cast("Callable[P, R]", self._function), name, {**self._bound, **bound})

    def _build(self) -> Callable[P, R]:
        with _lock:
            if self._ready is None:
                self._ready = self._with_or_without_prefetch()
            return self._ready

    def _with_or_without_prefetch(self) -> Callable[P, R]:
        import numba

        if prefetching.wanted():
            try:
                return self._compile()
            except (numba.core.errors.NumbaError, RuntimeError, TypeError, AttributeError) as error:
                # this llvmlite cannot build the instruction; any other error is raised again below
                prefetching.give_up(error)
        return self._compile()

    def _compile(self) -> Callable[P, R]:
        import numba

        annotations = self._function.__annotations__
        takes = [
            arrays.numba_type(kind, numba.types)
            for name, kind in annotations.items()
            if name != "return"
        ]
        returns = arrays.numba_type(annotations["return"], numba.types)
        dispatcher = numba.njit(**_OPTIONS)(_linked(self._function, self._name, self._bound))
        with compiled_files.Turn() as turn:
            if all(map(compiled_files.is_own, (self._function, *self._bound.values()))):
                compiled_files.keep(dispatcher, prefetching.wanted(), turn)
            dispatcher.compile(returns(*takes))
        dispatcher.disable_compile()
        return cast("Callable[P, R]", dispatcher)


def kernel(function: Callable[P, R]) -> Kernel[P, R]:
    """Decorates a function that Python calls and numba compiles."""
    return Kernel(function, function.__name__, {})


def _linked(function: FunctionType, name: str, bound: dict[str, Any]) -> FunctionType:
    """A copy of the function whose global names refer to compiled parts."""
    scope = {**function.__globals__, **bound}
    for used in _names(function):
        if used in scope and isinstance(scope[used], FunctionType) and scope[used] in _parts:
            scope[used] = _compiled_part(scope[used])
    copy = FunctionType(function.__code__, scope, name, function.__defaults__)
    # numba caches compiled code under this name, so variants need different names
    copy.__qualname__ = name
    copy.__module__ = function.__module__
    return copy


def _compiled_part(function: FunctionType) -> Any:
    if function is prefetching.prefetch:
        return prefetching.instruction()
    key = function, prefetching.wanted()
    if key not in _compiled:
        import numba

        _compiled[key] = numba.njit(**_OPTIONS)(_linked(function, function.__name__, {}))
    return _compiled[key]


def _names(function: FunctionType) -> tuple[str, ...]:
    return function.__code__.co_names


part(prefetching.prefetch)
