# SPDX-License-Identifier: Apache-2.0
"""Memory for frames is used again, but never under the feet of its user."""

from __future__ import annotations

import numpy as np
import torch

from fleetlight.ps.transport.frames import _KEEP_BYTES, _WORTH_BYTES, _Memory

SIZE = 4 * _WORTH_BYTES


def address(array: np.ndarray) -> int:  # type: ignore[type-arg]
    return int(array.__array_interface__["data"][0])


def test_free_memory_is_used_again() -> None:
    memory = _Memory()
    first = address(memory.take(SIZE))
    assert address(memory.take(SIZE // 2)) == first


def test_memory_in_use_is_left_alone() -> None:
    memory = _Memory()
    view = memory.take(SIZE)[8:].view(np.float64)[:3]
    tensor = torch.from_numpy(memory.take(SIZE)[:16])
    places = {address(memory.take(SIZE)) for _ in range(5)}
    assert address(view) - 8 not in places
    assert tensor.data_ptr() not in places


def test_a_caller_that_holds_the_last_answer_alternates_between_two() -> None:
    memory = _Memory()
    places = set()
    held = memory.take(SIZE)
    for _ in range(6):
        held = memory.take(SIZE)
        places.add(address(held))
    assert len(places) == 2


def test_neither_too_much_nor_too_little_is_kept() -> None:
    memory = _Memory()
    for size in (_WORTH_BYTES - 1, _KEEP_BYTES + 1):
        memory.take(size)
    assert memory._held == []
    memory.take(SIZE)
    small = memory.take(SIZE // 8)
    assert small.base is None or len(small.base) < SIZE
