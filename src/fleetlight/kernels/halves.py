# SPDX-License-Identifier: Apache-2.0
"""Two threads that share a large operation: kernels let go of the GIL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

R = TypeVar("R")

#: fewer things are done before a second thread has begun
WORTH_SHARING = 4096


def in_halves(helper: Executor | None, count: int, act: Callable[[slice], R]) -> list[R]:
    """What `act` answers for the first half of `count` things and, from the helper, for the second.

    Of little, or where nobody helps, the first half is all.
    """
    if helper is None or count < WORTH_SHARING:
        return [act(slice(count))]
    middle = count // 2
    other = helper.submit(act, slice(middle, count))
    try:
        first = act(slice(middle))
    finally:
        second = other.result()
    return [first, second]
