# SPDX-License-Identifier: Apache-2.0
"""A snapshot stays what it was, whatever happens to the table."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ps.made_tables import some_ids

from fleetlight.kernels import BUCKETS, RowTable, buckets
from fleetlight.ps.tables.snapshot import Snapshot

few = st.lists(st.integers(0, 30), max_size=12)
changes = st.lists(st.tuples(st.sampled_from(["push", "remove", "read"]), few), max_size=20)


@settings(deadline=None)
@given(known=few, removed=few, changes=changes)
def test_reads_what_was_there(
    known: list[int], removed: list[int], changes: list[tuple[str, list[int]]]
) -> None:
    table = RowTable(2, "momentum", seed=1)
    table.insert(known)
    forgotten = table.find(removed)
    table.remove(forgotten[forgotten >= 0])
    snapshot = Snapshot(table)
    expected = table.rows[table.find(snapshot.ids)].copy()
    read = np.empty_like(expected)
    done = 0
    for change, ids in [*changes, ("read", list(range(40)))]:
        if change == "read":
            stop = min(done + len(ids), len(snapshot))
            read[done:stop] = snapshot.read(done, stop)
            done = stop
            continue
        numbers = table.find(ids)
        snapshot.keep(numbers)
        if change == "push":
            table.push(ids, np.ones((len(ids), 2)), table.rule.hyper({"lr": 1.0, "momentum": 0.5}))
        else:
            table.remove(numbers[numbers >= 0])
    assert done == len(snapshot) == len(expected)
    assert np.array_equal(read, expected)


def test_is_in_bucket_order_with_an_index() -> None:
    table = RowTable(2, "sgd")
    ids = some_ids(2000)
    table.insert(ids)
    snapshot = Snapshot(table)
    assert snapshot.starts.shape == (BUCKETS + 1,)
    for bucket in range(0, BUCKETS, 999):
        mine = snapshot.ids[snapshot.starts[bucket] : snapshot.starts[bucket + 1]]
        assert np.array_equal(mine, ids[buckets(ids) == bucket])


def test_only_rows_that_change_are_copied() -> None:
    table = RowTable(8, "sgd")
    ids = np.arange(100_000, dtype=np.int64)
    table.insert(ids)
    snapshot = Snapshot(table)
    before = snapshot.nbytes
    snapshot.keep(table.find(ids[:100]))
    once = snapshot.nbytes
    assert 0 < once - before < 100_000
    for _ in range(50):
        snapshot.keep(table.find(ids[:100]))
    assert snapshot.nbytes == once
    # rows that have been read may change as they like
    snapshot.read(0, len(snapshot))
    snapshot.keep(table.find(ids))
    assert snapshot.nbytes == once
