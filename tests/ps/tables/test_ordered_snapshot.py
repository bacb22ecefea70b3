# SPDX-License-Identifier: Apache-2.0
"""Snapshots and locks of a table in use."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ps.made_tables import LR, make, ones, some_ids

from fleetlight.kernels import BUCKETS, RowTable, buckets
from fleetlight.kernels.rows import index as index_module
from fleetlight.kernels.rows import memory
from fleetlight.ps.tables import ordered_snapshot as snapshot_module
from fleetlight.ps.tables import table as table_module
from fleetlight.ps.tables.ordered_snapshot import OrderedSnapshot
from fleetlight.ps.tables.table_lock import TableLock
from fleetlight.ps.tables.unordered_snapshot import UnorderedSnapshot

# Snapshots stay consistent while their table changes.


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


# UnorderedSnapshot: its memory cost; its consistency is tested in test_ordered_snapshot.


SIZE = 100


def made(rows: int) -> tuple[RowTable, UnorderedSnapshot]:
    table = RowTable(8, "sgd")
    table.insert(range(rows))
    return table, UnorderedSnapshot(table, SIZE)


def test_only_changed_rows_are_copied_and_each_once() -> None:
    table, sweep = made(1000)
    before = sweep.nbytes
    for _ in range(50):
        sweep.keep(table.find(range(250)))
    # two batches are full, and a third has the rest
    assert sweep.nbytes - before == 2 * SIZE * (8 * 4 + 8 + 8)
    assert [len(ids) for ids, _ in sweep.pieces(contextlib.nullcontext())][:2] == [SIZE, SIZE]


def test_copied_rows_are_written_first_and_their_memory_reused() -> None:
    table, sweep = made(1000)
    sweep.make_room()
    held, first = sweep.nbytes, []
    pieces = sweep.pieces(contextlib.nullcontext())
    for at in range(0, 1000, 2 * SIZE):
        sweep.keep(table.find(range(at, at + SIZE)))
        assert sweep.nbytes <= held
        first += [set(next(pieces)[0])]
    assert first == [set(range(at, at + SIZE)) for at in range(0, 1000, 2 * SIZE)]
    assert sum(len(ids) for ids, _ in pieces) == 500
    # all rows are written, so changes need no more copies
    before = sweep.nbytes
    sweep.keep(table.find(range(1000)))
    assert sweep.nbytes == before


def test_a_row_without_memory_is_copied_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    table, sweep = made(3 * SIZE)

    def none(self: UnorderedSnapshot) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(UnorderedSnapshot, "_new_batch", none)
        for _ in range(2):
            with pytest.raises(MemoryError):
                sweep.keep(table.find(range(2 * SIZE)))
    sweep.keep(table.find(range(2 * SIZE)))
    found = np.concatenate([ids.copy() for ids, _ in sweep.pieces(contextlib.nullcontext())])
    assert sorted(found) == list(range(3 * SIZE))


def test_a_small_table_needs_little_memory() -> None:
    _, sweep = made(3)
    sweep.make_room()
    assert sweep.nbytes < 1000


def test_an_empty_table_has_a_snapshot() -> None:
    _, sweep = made(0)
    assert [len(ids) for ids, _ in sweep.pieces(contextlib.nullcontext())] == [0]
    assert len(sweep) == 0


def test_rows_created_later_are_not_included() -> None:
    table, sweep = made(33)
    table.insert(range(100, 140))
    sweep.keep(table.find(range(100, 140)), np.arange(100, 140))
    found = np.concatenate([ids.copy() for ids, _ in sweep.pieces(contextlib.nullcontext())])
    assert sorted(found) == list(range(33))


# TableLock: a piece of a save comes before later pushes.


def until(condition: Callable[[], bool]) -> None:
    """Poll, with a deadline."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "no piece waits"
        time.sleep(1e-4)


def in_thread(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def holds(by: AbstractContextManager[Any], log: list[str], name: str) -> Callable[[], None]:
    """Holds a lock once."""

    def hold() -> None:
        with by:
            log.append(name)

    return hold


def test_the_owner_may_acquire_it_again_while_a_piece_waits() -> None:
    lock, log = TableLock(), []
    with lock, lock, lock.piece:
        waits = in_thread(holds(lock.piece, log, "piece"))
        until(lock._gate.locked)
        with lock, lock.piece, lock:
            log.append("owner")
    waits.join(30)
    assert log == ["owner", "piece"]


def test_a_waiting_piece_comes_before_later_calls() -> None:
    """The owner releases the lock and acquires it again at once."""
    lock, log = TableLock(), []
    for _ in range(50):
        with lock:
            waits = in_thread(holds(lock.piece, log, "piece"))
            until(lock._gate.locked)
        with lock:
            log.append("call")
        waits.join(30)
    assert log == 50 * ["piece", "call"]


def test_calls_and_pieces_exclude_each_other() -> None:
    lock, count = TableLock(), [0]

    def add(by: AbstractContextManager[Any]) -> None:
        for _ in range(300):
            with by:
                before = count[0]
                time.sleep(0)
                count[0] = before + 1

    threads = [in_thread(lambda by=by: add(by)) for by in (lock, lock, lock.piece, lock.piece)]
    for thread in threads:
        thread.join(60)
    assert count == [4 * 300]


def test_a_save_reads_its_pieces_ahead_of_later_pushes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push ends as soon as a piece waits, and the next push begins at once."""
    monkeypatch.setattr(table_module, "CHUNK_BYTES", 400)
    table, ids, log = make("adagrad"), some_ids(500), []
    table.pull(ids, insert=True)
    cut, pieces = table.cut(), -(-500 // (400 // (4 * 6)))
    read, push = OrderedSnapshot.read, RowTable.push

    def is_read() -> bool:
        return log.count("piece") == pieces

    def reads(*args: Any) -> Any:
        if not log:
            trains.start()
        log.append("piece")
        return read(*args)

    def pushes(*args: Any, **rest: Any) -> None:
        log.append("push")
        until(lambda: table.lock._gate.locked() or is_read())
        push(*args, **rest)

    def train() -> None:
        for step in itertools.takewhile(lambda _: not is_read(), itertools.count()):
            table.push(ids, ones(len(ids)), LR, step)

    monkeypatch.setattr(OrderedSnapshot, "read", reads)
    monkeypatch.setattr(RowTable, "push", pushes)
    trains = threading.Thread(target=train)
    table.save(cut, 0, tmp_path, "t.safetensors")
    trains.join(30)
    during = "".join(name[1] for name in log)
    assert during.count("i") == pieces
    assert "u" in during
    assert "uu" not in during[: during.rindex("i")]
