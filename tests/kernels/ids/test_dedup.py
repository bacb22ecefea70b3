# SPDX-License-Identifier: Apache-2.0
"""Dedup of the ids of a batch, grouped by server."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.batches import id_batches, same

from fleetlight.errors import ConfigError
from fleetlight.kernels import dedup, member, twin_table


@settings(deadline=None)
@given(id_batches, st.integers(1, 5))
def test_dedup_equals_the_twin(ids: NDArray[np.int64], servers: int) -> None:
    ours, twin = dedup(ids, servers), twin_table.dedup(ids, servers)
    assert same(ours.ids, twin.ids)
    assert same(ours.inverse, twin.inverse)
    assert same(ours.starts, twin.starts)


@settings(deadline=None)
@given(id_batches, id_batches)
def test_member_equals_the_twin(ids: NDArray[np.int64], of: NDArray[np.int64]) -> None:
    assert same(member(ids, of), twin_table.member(ids, of))


def test_dedup_of_a_large_batch() -> None:
    ids = np.random.default_rng(0).zipf(1.2, 50_000)
    deduped = dedup(ids, 3)
    assert (deduped.ids[deduped.inverse] == ids).all()
    assert len(deduped.ids) == len(np.unique(ids))
    parts = [deduped.ids[deduped.slice_of(s)] for s in range(3)]
    assert all((twin_table.servers_of(part, 3) == s).all() for s, part in enumerate(parts))
    assert sum(map(len, parts)) == len(deduped.ids)


def test_ids_that_collide_in_one_slot_stay_distinct() -> None:
    # the low bits of the hash choose the slot of the scratch table: here the same for all
    candidates = np.arange(3_000_000)
    ids = candidates[twin_table.splitmix64(candidates) & np.uint64(0xFFFF) == 0]
    assert len(ids) > 20
    twice = np.concatenate([ids, ids[::-1]])
    assert same(dedup(twice).inverse, twin_table.dedup(twice, 1).inverse)


def test_read_only_and_int32_ids_are_accepted() -> None:
    assert dedup(np.frombuffer(np.arange(4).tobytes(), np.int64)).ids.tolist() == [0, 1, 2, 3]
    assert dedup(np.array([[3, 3], [1, 2]], np.int32)).inverse.tolist() == [0, 0, 1, 2]


def test_float_ids_are_refused() -> None:
    with pytest.raises(ConfigError, match="ids are float32, expected integers"):
        dedup(np.ones(3, np.float32))
