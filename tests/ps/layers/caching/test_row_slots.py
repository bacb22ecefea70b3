# SPDX-License-Identifier: Apache-2.0
"""Slots of cached rows: no id loses or shares its slot, and no row is used past its limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetlight.ps.layers.caching.device_cache import RowSlots


def ids_of(ids: Sequence[int]) -> Any:
    return np.array(ids, np.int64)


def put(slots: RowSlots, ids: Sequence[int], steps: int = 0, version: int = 0) -> list[int]:
    found = slots.put(ids_of(ids), steps, np.full(len(ids), version, np.int64))
    return [int(one) for one in found]


def has(slots: RowSlots, ids: Sequence[int], at_least: int = 0) -> list[bool]:
    return [bool(one) for one in slots.find(ids_of(ids), at_least) >= 0]


def test_a_row_is_found_until_it_is_outdated_and_keeps_its_slot() -> None:
    slots = RowSlots(4)
    assert has(slots, [7, -3]) == [False, False]
    first = put(slots, [7, -3])
    assert slots.find(ids_of([-3, 5, 7]), 0).tolist() == [first[1], -1, first[0]]
    slots.outdate(ids_of([7, 99]))
    assert has(slots, [7, -3]) == [False, True]
    assert put(slots, [7]) == first[:1]
    assert has(slots, [7, -3]) == [True, True]
    slots.outdate_all()
    assert has(slots, [7, -3]) == [False, False]
    assert len(slots) == 2


def test_rows_of_other_ids() -> None:
    slots = RowSlots(4)
    assert not slots.has_others(ids_of([]))
    put(slots, [7, -3])
    assert slots.has_others(ids_of([7, 5]))
    assert not slots.has_others(ids_of([-3, 5, 7]))
    slots.outdate(ids_of([-3]))
    assert not slots.has_others(ids_of([7]))


def test_a_row_is_found_while_it_includes_enough_steps() -> None:
    slots = RowSlots(4)
    put(slots, [1], steps=3)
    put(slots, [2], steps=5)
    assert has(slots, [1, 2], at_least=3) == [True, True]
    assert has(slots, [1, 2], at_least=4) == [False, True]


def test_the_oldest_version_of_some_rows() -> None:
    slots = RowSlots(4)
    put(slots, [1], version=8)
    put(slots, [2], version=6)
    assert slots.version(slots.find(ids_of([1, 2, 3]), 0)) == 6
    assert slots.version(slots.find(ids_of([3]), 0)) is None


def test_rows_that_were_not_used_for_the_longest_time_leave_first() -> None:
    slots = RowSlots(4)
    for one in (1, 2, 3, 4):
        has(slots, [one])
        put(slots, [one])
    has(slots, [1, 5])
    put(slots, [5])
    assert has(slots, [1, 2, 3, 4, 5]) == [True, False, True, True, True]


def test_a_batch_above_the_capacity_keeps_the_rows_that_it_uses() -> None:
    slots = RowSlots(3)
    has(slots, [1, 2])
    put(slots, [1, 2])
    assert has(slots, [1, 2, 3, 4, 5]) == [True, True, False, False, False]
    assert [one >= 0 for one in put(slots, [3, 4, 5])] == [True, False, False]
    assert has(slots, [1, 2, 3, 4, 5]) == [True, True, True, False, False]


SOME = st.lists(st.integers(0, 11), max_size=8, unique=True)


@settings(max_examples=80)
@given(st.lists(st.tuples(SOME, SOME), max_size=12), st.integers(1, 9))
def test_ids_never_share_a_slot(steps: list[tuple[list[int], list[int]]], capacity: int) -> None:
    """A store with a value for each slot gives back what was put for an id."""
    slots, store, values = RowSlots(capacity), np.zeros(capacity), dict.fromkeys(range(12), 0)
    for step, (ids, changed) in enumerate(steps, 1):
        found = slots.find(ids_of(ids), 0)
        for one, slot in zip(ids, found, strict=True):
            assert slot < 0 or store[slot] == values[one]
        missing = [one for one, slot in zip(ids, found, strict=True) if slot < 0]
        for one, slot in zip(missing, put(slots, missing), strict=True):
            if slot >= 0:
                store[slot] = values[one]
        assert len(slots) <= capacity
        values.update(dict.fromkeys(changed, step))
        slots.outdate(ids_of(changed))
