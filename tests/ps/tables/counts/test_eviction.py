# SPDX-License-Identifier: Apache-2.0
"""Tables with a maximum of rows, compared with a dict that sorts all its rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.batches import same
from tests.ps.made_tables import LR, by_id, ids_of, make, ones, read, saved

from fleetlight.kernels import splitmix64
from fleetlight.ps.plan import EntryPlan
from fleetlight.ps.tables.table import Table
from fleetlight.ps.update import Floats, Ids

MAX_ROWS, PART = 20, 2
ENTRIES = {"age": None, "count": None, "score": EntryPlan("show_click")}
pushes = st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True), max_size=25)


def capped(evict: str, **more: Any) -> Table:
    return make(entry=ENTRIES[evict], max_rows=MAX_ROWS, evict=evict, **more)


def known(table: Table) -> set[int]:
    """The ids that have a row."""
    return set(table._rows.ids_of(table._rows.numbers).tolist())


def push(table: Table, ids: Ids, shows: Floats | None = None, clicks: Floats | None = None) -> None:
    table.push(ids, ones(len(ids)), LR, 0, shows, clicks)


@dataclasses.dataclass
class Oracle:
    """What the rows of a table should be, by id: shows, clicks, last push."""

    evict: str
    rows: dict[int, tuple[float, float, int]] = dataclasses.field(default_factory=dict)
    clock: int = 0

    def push(self, ids: list[int], clicked: list[bool]) -> None:
        self.clock += 1
        excess = len(self.rows | dict.fromkeys(ids)) - MAX_ROWS
        if excess > 0:
            others = sorted((i for i in self.rows if i not in ids), key=self.rank)
            for i in others[: max(excess, PART)]:
                del self.rows[i]
        for i, click in zip(ids, clicked, strict=True):
            shows, clicks, _ = self.rows.get(i, (0.0, 0.0, 0))
            self.rows[i] = shows + 1, clicks + click, self.clock

    def rank(self, i: int) -> tuple[float, ...]:
        shows, clicks, last = self.rows[i]
        score = np.float32(0.1) * np.float32(shows - clicks) + np.float32(clicks)
        first = {"age": last, "count": shows, "score": float(score)}[self.evict]
        return first, last, int(splitmix64([i])[0])


@pytest.mark.parametrize("evict", ENTRIES)
@settings(deadline=None, max_examples=30)
@given(steps=pushes, memory=st.sampled_from([0, 1]))
def test_the_rows_of_lowest_rank_leave(evict: str, steps: list[list[int]], memory: int) -> None:
    table, oracle = capped(evict, memory=memory), Oracle(evict)
    for ids in steps:
        table.pull(np.array(ids, np.int64), insert=True)
        clicked = [(i + len(ids)) % 3 == 0 for i in ids]
        counts = None, None
        if evict == "score":
            counts = np.ones(len(ids), np.float32), np.array(clicked, np.float32)
        push(table, np.array(ids, np.int64), *counts)
        oracle.push(ids, clicked)
        assert known(table) == set(oracle.rows)
        assert len(table) <= MAX_ROWS


def test_an_evicted_id_starts_again() -> None:
    table = capped("age")
    first = read(make(), ids_of(0))
    push(table, ids_of(0))
    push(table, ids_of(0))
    for i in range(1, MAX_ROWS + 1):
        push(table, ids_of(i))
    assert same(read(table, ids_of(0)), first)
    push(table, ids_of(0))
    assert same(read(table, ids_of(0)), first - np.float32(LR["lr"]))


def test_pulls_do_not_insert() -> None:
    table = capped("count")
    assert same(table.pull(ids_of(1, 2), insert=True), read(make(), ids_of(1, 2)))
    assert len(table) == 0
    assert not table.counts_pulls


def test_a_pull_counts_where_the_entry_needs_it() -> None:
    table = make(entry=EntryPlan("count", 2.0), max_rows=4, evict="age")
    assert table.counts_pulls
    table.pull(ids_of(1, 2, 3, 4), insert=True)
    push(table, ids_of(1, 2, 3, 4))
    table.pull(ids_of(7, 8), insert=True)
    table.pull(ids_of(1), insert=True)
    assert len(table) == 6
    # these ids are not admitted, and get no row
    push(table, ids_of(5, 6))
    assert len(table) == 4
    assert {1, 7, 8} <= known(table)


def test_a_push_of_more_ids_than_the_maximum_keeps_them_until_the_next() -> None:
    table = capped("age")
    push(table, np.arange(5))
    push(table, np.arange(100, 100 + MAX_ROWS + 7))
    assert known(table) == set(range(100, 100 + MAX_ROWS + 7))
    push(table, ids_of(1))
    assert len(table) <= MAX_ROWS


def test_each_server_has_its_part_of_the_maximum() -> None:
    plan = capped("age").plan
    table = Table(plan, 7, server_num=4)
    for i in range(30):
        push(table, ids_of(i))
    assert len(table) <= MAX_ROWS // 4


@pytest.mark.parametrize("evict", ENTRIES)
@pytest.mark.parametrize("memory", [0, 1])
def test_a_loaded_table_evicts_what_the_saved_one_does(
    evict: str, memory: int, tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    steps = [np.unique(random.integers(0, 60, 6)) for _ in range(30)]
    table, other = capped(evict, memory=memory), capped(evict)
    for number, ids in enumerate(steps):
        for one in {table, other}:
            push(one, ids, np.ones(len(ids), np.float32), (ids % 2).astype(np.float32))
        if number in (10, 20):
            # the row numbers of the loaded table are others
            table.save(table.cut(), 0, tmp_path, f"table{number}")
            table = capped(evict, memory=memory)
            table.load([tmp_path / f"table{number}"], None)
    assert by_id([saved(table, tmp_path / "a")]) == by_id([saved(other, tmp_path / "b")])


def test_files_of_tables_with_and_without_a_maximum(tmp_path: Path) -> None:
    plain, counted = make(), make(entry=EntryPlan("show_click"))
    for name, table in (("plain", plain), ("counted", counted), ("capped", capped("score"))):
        push(table, np.arange(15), np.ones(15, np.float32))
        table.save(table.cut(), 0, tmp_path, name)
        for other in (make(), make(entry=EntryPlan("show_click")), capped("score")):
            other.load([tmp_path / name], None)
            assert same(read(other, np.arange(20)), read(table, np.arange(20)))
            push(other, np.arange(15, 25), np.ones(10, np.float32))
    assert len(other) <= MAX_ROWS


def test_evicted_ids_are_removed_in_a_publication() -> None:
    table = capped("age")
    push(table, np.arange(MAX_ROWS))
    table.cut_changes(whole=True)
    table.settle_changes(published=True)
    push(table, np.arange(50, 55))
    cut = table.cut_changes(whole=False)
    ids = np.concatenate([ids for ids, _ in table.published_pieces(cut)])
    assert len(cut.removed) == 5
    assert set(cut.removed.tolist()) == set(range(MAX_ROWS)) - known(table)
    assert set(ids.tolist()) == set(range(50, 55))


def test_a_save_has_the_rows_that_leave_meanwhile(tmp_path: Path) -> None:
    table = capped("age")
    push(table, np.arange(MAX_ROWS))
    cut = table.cut()
    push(table, np.arange(50, 60))
    table.save(cut, 0, tmp_path, "t")
    loaded = capped("age")
    loaded.load([tmp_path / "t"], None)
    assert known(loaded) == set(range(MAX_ROWS))
    push(loaded, np.arange(50, 60))
    assert known(loaded) == known(table)


def test_a_table_with_a_maximum_shrinks() -> None:
    table = capped("count")
    push(table, np.arange(10))
    push(table, np.arange(5))
    assert table.shrink(0, 0.15, 1.0) == (5, 5)
    assert known(table) == set(range(5))


def test_a_push_without_ids_is_none() -> None:
    table, other = capped("age"), capped("age")
    for ids in (np.arange(5), np.arange(0), np.arange(5, 9)):
        push(table, ids)
        if len(ids):
            push(other, ids)
    assert same(table._rows.meta, other._rows.meta)
