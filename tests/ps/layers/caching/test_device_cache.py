# SPDX-License-Identifier: Apache-2.0
"""Rows on a device: equal to those of the servers, whatever happens during a lookup."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ps.layers.devices import as_on_a_gpu

from fleetlight.kernels import dedup
from fleetlight.ps.layers.caching import device_cache
from fleetlight.ps.layers.caching.device_cache import CacheLookup, DeviceCache, RowSlots
from fleetlight.ps.layers.staging import BlockingStaging

SERVERS, DIM = 2, 3
CPU = torch.device("cpu")


class Source:
    """Rows of ids 0 to 29, and a cache before them."""

    def __init__(self, capacity: int = 100) -> None:
        self.rows = np.arange(30 * DIM, dtype=np.float32).reshape(30, DIM)
        self.cache = DeviceCache(DIM, capacity, lambda: CPU)

    def begin(self, ids: Sequence[int], at_least: int = 0) -> CacheLookup:
        return self.cache.begin(dedup(np.array(ids, np.int64), SERVERS), at_least)

    def finish(self, lookup: CacheLookup, steps: int = 0) -> Any:
        arrived = self.rows[lookup.wanted.ids[lookup.missing]]
        return self.cache.finish(lookup, arrived, steps, {0: 4, 1: 9})

    def look_up(self, ids: Sequence[int], at_least: int = 0, steps: int = 0) -> int:
        """Look ids up, check their rows, and return how many were pulled."""
        lookup = self.begin(ids, at_least)
        found = self.finish(lookup, steps)
        np.testing.assert_array_equal(found.numpy(), self.rows[lookup.wanted.ids])
        return int(lookup.missing.sum())

    def change(self, ids: list[int]) -> None:
        self.rows[ids] += 100
        self.cache.outdate([np.array(ids, np.int64)])


def test_only_rows_that_are_not_there_are_pulled() -> None:
    source = Source()
    assert source.look_up([5, 1, 5]) == 2
    assert source.look_up([1, 5]) == 0
    assert source.look_up([9, 1, 8]) == 2
    assert source.look_up([]) == 0
    assert (source.cache.found, source.cache.pulled) == (3, 4)


def test_changed_rows_are_pulled_again() -> None:
    source = Source()
    source.look_up(range(8))
    source.change([2, 20])
    assert source.look_up(range(8)) == 1
    source.rows += 1
    source.cache.outdate_all()
    assert source.look_up(range(8)) == 8


def test_rows_that_arrive_after_a_change_are_not_kept() -> None:
    """They may have been read before it."""
    source = Source()
    lookup = source.begin([1, 2])
    old = source.finish(lookup).clone()
    source.cache.outdate_all()
    lookup = source.begin([1, 2])
    source.change([1])
    assert torch.equal(source.cache.finish(lookup, old.numpy(), 0, {}), old)
    assert source.look_up([1, 2]) == 2


def test_a_pause_keeps_no_rows() -> None:
    source = Source()
    source.look_up([1, 2])
    source.cache.pause(True)
    for _ in range(2):
        assert source.look_up([1, 2]) == 2
        source.rows += 1
    source.cache.outdate_all()
    assert source.look_up([1, 2]) == 2
    source.cache.outdate_all()
    source.cache.pause(False)
    assert [source.look_up([1, 2]) for _ in range(2)] == [2, 0]


def test_old_rows_are_pulled_again() -> None:
    source = Source()
    source.look_up([1, 2], steps=3)
    assert source.look_up([1, 2, 3], at_least=3, steps=4) == 1
    source.rows += 1
    assert source.begin([1, 2, 3], at_least=4).missing.tolist() == [
        one != 3 for one in source.begin([1, 2, 3]).wanted.ids
    ]


def test_the_oldest_version_of_each_server() -> None:
    source = Source()
    assert source.begin(range(9)).versions == {}
    source.look_up(range(9))
    lookup = source.begin(range(12))
    assert lookup.versions == {0: 4, 1: 9}
    assert source.begin([int(lookup.wanted.ids[0])]).versions == {0: 4}


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_a_cache_that_is_too_small_returns_all_rows(capacity: int) -> None:
    source = Source(capacity)
    random = np.random.default_rng(0)
    for _ in range(30):
        source.look_up([int(one) for one in random.integers(0, 30, 7)])
        source.change([int(one) for one in random.integers(0, 30, 2)])


def test_rows_follow_their_layers_to_another_device() -> None:
    source = Source()
    source.look_up([1, 2])
    # no other device has values here
    source.cache._rows = source.cache._rows.to("meta")  # type: ignore[union-attr]
    assert source.look_up([1, 2]) == 2


def test_a_cache_made_in_inference_mode_serves_training() -> None:
    source = Source()
    with torch.inference_mode():
        source.look_up([1])
    assert not source.finish(source.begin([1, 2])).is_inference()
    assert source.look_up([1, 2]) == 0


def test_only_missing_rows_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    late = as_on_a_gpu(monkeypatch)
    copied: list[int] = []

    def counted(array: Any) -> Any:
        if array.dtype == np.float32:
            copied.append(len(array))
        return BlockingStaging.to_device(late, array)

    monkeypatch.setattr(late, "to_device", counted)
    source = Source()
    source.look_up([1, 2, 3])
    source.look_up([1, 2, 3, 4])
    assert copied == [3, 1]


def test_each_use_of_the_rows_follows_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads may have streams of their own."""
    streams: list[Any] = []

    class Streams(BlockingStaging):
        def after(self, stream: object) -> object:
            streams.append(stream)
            return len(streams)

    staging = Streams(CPU)
    monkeypatch.setattr(device_cache, "staging_of", lambda _: staging)
    source = Source()
    source.look_up([1, 2])
    source.look_up([1, 3])
    assert streams == [None, 1, 2, 3]


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
