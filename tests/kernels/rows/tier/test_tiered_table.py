# SPDX-License-Identifier: Apache-2.0
"""TieredRowTable, compared to the bit with a RowTable that has all rows in memory."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray
from tests.kernels.batches import id_batches, numbers, same

from fleetlight import kernels
from fleetlight.errors import ConfigError, RowFileError
from fleetlight.kernels.arrays import Int32s, Matrix
from fleetlight.kernels.rows import memory
from fleetlight.kernels.rows.tier import tiered_table
from fleetlight.kernels.rows.tier.tiered_table import MIN_SLOTS

OPTIONS = {"lr": 0.1, "initial_accumulator_value": 0.1, "weight_decay": 0.01, "momentum": 0.9}
HOW = kernels.Initializer("uniform", -0.1, 0.1)
SEGMENT = 8
Batch = NDArray[np.int64]


class ListedRecords:
    """A RowStore in memory, with segments of a few records, that can be full."""

    def __init__(self) -> None:
        self.records: dict[int, NDArray[np.float32]] = {}
        self.width = 0
        self.top = 0
        self.is_full = False
        self.dropped: set[int] = set()
        self.expected: set[int] = set()

    def append(self, records: Matrix) -> Int32s:
        if self.is_full:
            raise OSError(errno.ENOSPC, "full")
        self.width = records.shape[1]
        positions = np.arange(self.top, self.top + len(records), dtype=np.int32)
        self.records.update(zip(positions.tolist(), records.copy(), strict=True))
        self.top += len(records)
        return positions

    def read(self, positions: Batch) -> Matrix:
        blank = np.zeros(self.width, np.float32)
        rows = [self.records.get(at, blank) for at in positions.tolist()]
        return np.array(rows, np.float32).reshape(len(rows), self.width)

    def expect(self, positions: Batch) -> None:
        self.expected = set(positions.tolist())

    def free(self, positions: Batch) -> None:
        assert len(np.unique(positions)) == len(positions)
        for at in positions.tolist():
            del self.records[at]

    def sparse_positions(self) -> Batch | None:
        for start in range(0, self.top // SEGMENT * SEGMENT, SEGMENT):
            live = sum(at in self.records for at in range(start, start + SEGMENT))
            if 0 < live < SEGMENT // 2:
                return np.arange(start, start + SEGMENT)
        return None


def tiered(
    dim: int, rule: Any, meta: int = 0, slots: int = MIN_SLOTS, narrow: bool = False, **rest: Any
) -> tuple[kernels.TieredRowTable, ListedRecords]:
    store = ListedRecords()
    kind = kernels.TieredNarrowRowTable if narrow else kernels.TieredRowTable
    return kind(dim, rule, 11, HOW, meta, slots=slots, store=store, **rest), store


class Both(RuleBasedStateMachine):
    """Makes the same calls to a tiered table and to one in memory."""

    @initialize(
        dim=st.integers(1, 5),
        name=st.sampled_from(sorted(kernels.RULES)),
        meta=st.integers(0, 4),
        narrow=st.booleans(),
        slots=st.sampled_from([MIN_SLOTS, 21]),
    )
    def begin(self, dim: int, name: str, meta: int, narrow: bool, slots: int) -> None:
        learn = kernels.rule_named(name, OPTIONS)
        self.tiered, self.store = tiered(dim, learn, meta, slots, narrow)
        self.plain = (kernels.NarrowRowTable if narrow else kernels.RowTable)(
            dim, learn, 11, HOW, meta
        )
        self.step = 0

    @rule(ids=id_batches, insert=st.booleans())
    def pull(self, ids: Batch, insert: bool) -> None:
        assert same(self.tiered.pull(ids, insert=insert), self.plain.pull(ids, insert=insert))

    @rule(ids=id_batches)
    def push(self, ids: Batch) -> None:
        self.step += 1
        grads = numbers(self.step, len(ids), self.plain.dim)
        hyper = self.plain.rule.hyper(OPTIONS, self.step)
        for table in (self.tiered, self.plain):
            table.push(ids, grads, hyper, step=self.step)

    @rule(start=st.integers(0, 200), count=st.integers(1, 70))
    def push_many(self, start: int, count: int) -> None:
        """More rows than fit memory."""
        self.push(np.arange(start, start + count))

    @precondition(lambda self: len(self.plain))
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.lists(st.integers(-1, self.plain.top), max_size=self.plain.top))
        assert self.tiered.remove(gone) == self.plain.remove(gone)

    @rule(ids=id_batches)
    def load(self, ids: Batch) -> None:
        rows = np.abs(numbers(7, len(ids), self.plain.whole_width))
        self.tiered.load(ids, rows)
        self.plain.load(ids, rows)

    @rule(ids=id_batches)
    def change_by_number(self, ids: Batch) -> None:
        for table in (self.tiered, self.plain):
            found = np.unique(table.insert(ids))
            table.set_weights(found, numbers(3, len(found), table.dim))
            table.meta[found] += 1
            table.learn(found, numbers(4, len(found), table.dim), table.rule.hyper(OPTIONS, 1))

    @rule(ids=id_batches)
    def fail_to_evict(self, ids: Batch) -> None:
        """A full disk: the call fails or not, and changes nothing or all."""
        self.store.is_full = True
        try:
            self.tiered.pull(ids)
        except OSError:
            pass
        finally:
            self.store.is_full = False
        self.pull(ids, True)

    @invariant()
    def same_rows(self) -> None:
        inside = self.plain.numbers
        assert (self.tiered.numbers == inside).all()
        assert (self.tiered.freed == self.plain.freed).all()
        assert same(self.tiered.ids_of(inside), self.plain.ids_of(inside))
        ours, at = self.tiered.stored(inside.astype(np.int64))
        assert same(ours[at], self.plain.rows[inside])
        assert same(self.tiered.meta[inside], self.plain.meta[inside])

    @invariant()
    def the_store_has_what_memory_lacks(self) -> None:
        slots = self.tiered._slots
        held = slots.owners[slots.owners >= 0]
        assert len(held) == len(slots) - slots.unused
        assert (slots.where[held] > 0).all()
        assert (slots.uses < 64).all()
        where = slots.where[self.plain.numbers]
        positions = [*(-where[where < 0] - 1), *(slots.copies[slots.copies > 0] - 1)]
        assert sorted(self.store.records) == sorted(positions)


TestBoth = Both.TestCase
TestBoth.settings = settings(deadline=None, max_examples=30, stateful_step_count=25)


def test_more_row_numbers_than_were_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "reserve", lambda count, dtype: None)
    monkeypatch.setattr("fleetlight.kernels.rows.tier.slots._FIRST_ROWS", 3)
    table, _ = tiered(2, "adagrad", meta=2)
    plain = kernels.RowTable(2, "adagrad", 11, HOW, 2)
    for batch in np.array_split(np.arange(500) * 7919, 37):
        assert same(table.pull(batch), plain.pull(batch))
        for one in (table, plain):
            one.meta[one.find(batch)] = 3
    assert same(table.rows, plain.rows)


def test_frequent_rows_stay_in_memory() -> None:
    table, store = tiered(2, "sgd", slots=100)
    often = np.arange(20)
    table.insert(np.arange(400))
    for start in range(20, 400, 40):
        table.pull(often)
        table.pull(np.arange(start, start + 40))
    assert set(table.find(often).tolist()) <= set(table._slots.owners.tolist())
    assert len(store.records) >= 300


def test_rows_that_did_not_change_are_not_written_again() -> None:
    table, store = tiered(2, "sgd")
    table.insert(np.arange(100))
    written = store.top
    for start in range(0, 100, 5):
        table.pull(np.arange(start, start + 5), insert=False)
    # the rows that had not left memory before
    assert store.top - written <= MIN_SLOTS


def test_reading_all_rows_keeps_those_in_memory() -> None:
    table, _ = tiered(2, "sgd")
    table.insert(np.arange(100))
    held = table._slots.owners.copy()
    order = table.reading_order(table.top)
    assert order is not None
    assert sorted(order.tolist()) == list(range(100))
    assert (np.diff(table._slots.where[order]) < 0).all()
    assert same(table.stored(order)[0], table.rows[order])
    assert same(table._slots.owners, held)


def test_a_file_with_other_contents_is_an_error() -> None:
    table, store = tiered(2, "sgd")
    table.insert(np.arange(100))
    gone = int(np.flatnonzero(table._slots.where[:100] < 0)[0])
    position = -int(table._slots.where[gone]) - 1
    store.records[position] = store.records[position] * np.float32(2) + 1
    before = table._slots.unused
    with pytest.raises(RowFileError, match=f"at position {position}, expected row {gone}"):
        table.pull(table.ids_of([gone]))
    assert table._slots.unused >= before


def test_a_table_needs_some_slots() -> None:
    assert kernels.TieredRowTable.slots_in(1, 32) == MIN_SLOTS
    assert kernels.TieredRowTable.slots_in(1 << 30, 32) == (1 << 30) // (4 * 32 + 13)
    with pytest.raises(ConfigError, match="got 3 rows in memory, expected at least 16"):
        tiered(1, "sgd", slots=3)


def test_bytes_in_use() -> None:
    table, _ = tiered(4, "adagrad", meta=4)
    empty = table.nbytes
    table.insert(np.arange(100))
    assert table.nbytes == empty + len(table._slots) * 4 * 8 - table._slots.unused * 32 + 100 * 24


def test_rows_are_evicted_in_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiered_table, "_EVICTED", 10)
    table, store = tiered(1, "sgd", slots=64)
    table.insert(np.arange(64))
    table.insert([100])
    assert len(store.records) == 10
    assert table._slots.unused == 9


def test_the_disk_begins_with_rows_that_are_not_in_memory() -> None:
    table, store = tiered(2, "sgd")
    ids = np.arange(5 * MIN_SLOTS)
    table.insert(ids)
    where = table._slots.where[: table.top]
    begin = table.reading(np.concatenate([ids[::2], [-7, 10**9]]))
    assert begin is not None
    assert not store.expected
    begin()
    outside = where[where < 0].tolist()
    assert store.expected == {-at - 1 for at in where[table.find(ids[::2])].tolist() if at < 0}
    assert 0 < len(store.expected) < len(outside)
    assert len(table) == len(ids), "no row is inserted"
    assert table.reading(ids[where > 0]) is None
    assert kernels.RowTable(2, "sgd").reading(ids) is None
