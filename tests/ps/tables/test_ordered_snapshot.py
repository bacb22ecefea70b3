# SPDX-License-Identifier: Apache-2.0
"""Snapshots stay consistent while their table changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ps.made_tables import some_ids

from fleetlight.kernels import BUCKETS, RowTable, buckets
from fleetlight.kernels.rows import index as index_module
from fleetlight.kernels.rows import memory
from fleetlight.ps.tables import ordered_snapshot as snapshot_module
from fleetlight.ps.tables.ordered_snapshot import OrderedSnapshot
from fleetlight.ps.tables.unordered_snapshot import UnorderedSnapshot

few = st.lists(st.integers(0, 60), max_size=12)
change = st.tuples(st.sampled_from(["push", "remove", "insert", "nothing"]), few)
changes = st.lists(change, max_size=30)
kinds = st.sampled_from([OrderedSnapshot, UnorderedSnapshot])


@pytest.fixture(params=["reserved", "copied"])
def cramped(request: pytest.FixtureRequest) -> Iterator[None]:
    """An index that grows all the time, and pieces of a few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "_FIRST_SLOTS", 4)
        patch.setattr(index_module, "_MOVES", 1)
        patch.setattr(snapshot_module, "LIST_ROWS", 3)
        if request.param == "copied":
            patch.setattr(memory, "reserve", lambda count, dtype: None)
            patch.setattr("fleetlight.kernels.rows.slab._FIRST_ROWS", 3)
        yield


class Meanwhile:
    """A lock that runs a callback before it is acquired."""

    def __init__(self, happens: Callable[[], None]) -> None:
        self._happens = happens

    def __enter__(self) -> None:
        self._happens()

    def __exit__(self, *_: object) -> None:
        pass


class Training:
    """Trains a table and notifies its snapshot first, as `Table` does."""

    def __init__(self, table: RowTable, changes: list[tuple[str, list[int]]]) -> None:
        self._table = table
        self._changes = iter(changes)
        self.cut: OrderedSnapshot | UnorderedSnapshot | None = None

    def step(self) -> None:
        """Make one change."""
        table, (kind, ids) = self._table, next(self._changes, ("nothing", []))
        numbers = table.find(ids)
        known = numbers[numbers >= 0]
        if self.cut is not None and kind != "nothing":
            self.cut.keep(numbers)
        if kind == "push":
            table.push(ids, np.ones((len(ids), 2)), table.rule.hyper({"lr": 1.0, "momentum": 0.5}))
        elif kind == "remove":
            table.remove(known)
        elif kind == "insert":
            table.insert(ids)


@pytest.mark.usefixtures("cramped")
@settings(deadline=None)
@given(before=changes, after=changes, size=st.integers(1, 9), kind=kinds)
def test_a_snapshot_holds_the_rows_at_its_cut(
    before: list[tuple[str, list[int]]],
    after: list[tuple[str, list[int]]],
    size: int,
    kind: type[OrderedSnapshot | UnorderedSnapshot],
) -> None:
    """Rows are changed, created, removed and reused between all chunks."""
    table = RowTable(2, "momentum", seed=1)
    earlier = Training(table, before)
    for _ in before:
        earlier.step()
    training = Training(table, after)
    ids = np.sort(table.ids_of(table.numbers))
    expected = table.rows[table.find(ids)].copy()
    training.cut = cut = kind(table, size)
    training.step()
    meanwhile = Meanwhile(training.step)
    cut.prepare(meanwhile)
    found = [(np.empty(0, np.int64), np.empty((0, table.width), np.float32))]
    for some, rows in cut.pieces(meanwhile):
        assert len(some) <= size
        # changes between two pieces leave a piece alone
        training.step()
        cut.make_room()
        found.append((some.copy(), rows.copy()))
    got = np.concatenate([some for some, _ in found])
    order = np.argsort(got, kind="stable")
    assert np.array_equal(got[order], ids)
    assert np.array_equal(np.concatenate([rows for _, rows in found])[order], expected)
    if isinstance(cut, OrderedSnapshot):
        assert np.array_equal(got, ids[np.argsort(buckets(ids), kind="stable")])


def test_rows_free_at_the_cut_are_not_included() -> None:
    """Ids that come later take their numbers, and others become free in their place."""
    table = RowTable(2, "sgd")
    table.remove(table.insert(range(10))[:3])
    snapshot = OrderedSnapshot(table, 100)
    table.insert([100, 101, 102])
    snapshot.keep(table.find([7, 8, 9]))
    table.remove(table.find([7, 8, 9]))
    snapshot.prepare(contextlib.nullcontext())
    assert sorted(snapshot.ids) == [3, 4, 5, 6, 7, 8, 9]


def test_rows_are_in_bucket_order_with_an_index() -> None:
    table = RowTable(2, "sgd")
    ids = some_ids(2000)
    table.insert(ids)
    snapshot = ordered(table)
    assert snapshot.starts.shape == (BUCKETS + 1,)
    for bucket in range(0, BUCKETS, 999):
        mine = snapshot.ids[snapshot.starts[bucket] : snapshot.starts[bucket + 1]]
        assert np.array_equal(mine, ids[buckets(ids) == bucket])


def ordered(table: RowTable) -> OrderedSnapshot:
    snapshot = OrderedSnapshot(table, 100)
    snapshot.prepare(contextlib.nullcontext())
    return snapshot


def test_the_lock_is_held_for_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut and the search for its rows stop training for no longer than a piece takes."""
    monkeypatch.setattr(snapshot_module, "LIST_ROWS", 100)
    table = RowTable(2, "sgd")
    table.insert(some_ids(2000))
    table.remove(np.arange(0, 2000, 4))
    asked: list[int] = []
    honest = RowTable.ids_of

    def ids_of(table: RowTable, numbers: np.ndarray) -> np.ndarray:
        asked.append(len(numbers))
        return honest(table, numbers)

    monkeypatch.setattr(RowTable, "ids_of", ids_of)
    snapshot = OrderedSnapshot(table, 100)
    assert asked == []
    taken: list[None] = []
    snapshot.prepare(Meanwhile(lambda: taken.append(None)))
    assert max(asked) == 75
    # once for each piece of the freed and of all rows, and at the end
    assert len(taken) == 5 + 20 + 1


def test_memory_is_allocated_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(memory, "populate", lambda array: made.append(array.nbytes))
    monkeypatch.setattr(snapshot_module, "_ROOM_BYTES", 100 * 8 * 4)
    table = RowTable(8, "sgd")
    ids = np.arange(1000, dtype=np.int64)
    table.insert(ids)
    snapshot = OrderedSnapshot(table, 100)
    for count in (0, 0, 30, 950):
        snapshot.keep(table.find(ids[:count]))
        snapshot.make_room()
    # rows, and their ids, for which there is room, and no more than there are rows
    row, number = 8 * 4, 8
    rest = len(table.rows) - 130
    assert rest >= 870
    assert made == [100 * row, 100 * number, 30 * row, 30 * number, rest * row, rest * number]


def test_only_changed_rows_are_copied() -> None:
    table = RowTable(8, "sgd")
    ids = np.arange(100_000, dtype=np.int64)
    table.insert(ids)
    snapshot = OrderedSnapshot(table, 100)
    before = snapshot.nbytes
    snapshot.keep(table.find(ids[:100]))
    once = snapshot.nbytes
    assert once - before == 100 * (8 * 4 + 8)
    for _ in range(50):
        snapshot.keep(table.find(ids[:100]))
    assert snapshot.nbytes == once
    snapshot.prepare(contextlib.nullcontext())
    listed = snapshot.nbytes
    # rows that have been read may change as they like
    snapshot.read(0, len(snapshot))
    snapshot.keep(table.find(ids))
    assert snapshot.nbytes == listed
