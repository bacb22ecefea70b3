# SPDX-License-Identifier: Apache-2.0
"""Which ids get a row, and which lose it."""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.batches import same
from tests.ps.made_tables import (
    ALL,
    LR,
    by_id,
    ids_of,
    make,
    ones,
    read,
    saved,
    some_ids,
    table_plan,
)

from fleetlight.errors import ConfigError, PlanError
from fleetlight.kernels import splitmix64
from fleetlight.ps.layers.entries import (
    CountFilterEntry,
    EntryPolicy,
    ProbabilityEntry,
    ScoreEntry,
    ShowClickEntry,
)
from fleetlight.ps.plan import EntryPlan, Plan
from fleetlight.ps.tables import table as table_module
from fleetlight.ps.tables.server_state import ServerState
from fleetlight.ps.tables.table import Table
from fleetlight.ps.update import Floats, Ids

# Admission: which ids get rows that learn, what is counted, and which rows are removed.


def table_with(entry: EntryPolicy, geo: bool = False) -> Table:
    return make("sgd", geo=geo, entry=entry.plan)


def learns(table: Table, ids: Ids) -> list[bool]:
    """Push to ids; return which of their rows changed."""
    before = read(table, ids)
    table.push(ids, ones(len(ids)), LR, 0)
    changed: list[bool] = (read(table, ids) != before).any(axis=1).tolist()
    return changed


def test_a_row_learns_once_its_id_was_seen_often_enough() -> None:
    table = table_with(CountFilterEntry(3))
    table.pull(ids_of(1, 1, 1), insert=True)  # one worker's pull is one sighting
    table.pull(ids_of(1, 2), insert=True)
    table.pull(ids_of(1, 2), insert=False)
    assert len(table) == 2
    assert learns(table, ids_of(1, 2, 3)) == [False, False, False]
    assert len(table) == 2
    table.pull(ids_of(2, 1), insert=True)
    assert learns(table, ids_of(1, 2, 3)) == [True, False, False]


def test_gradients_of_repeated_ids_are_summed_before_admission() -> None:
    table = table_with(CountFilterEntry(1))
    table.pull(ids_of(1), insert=True)
    before = read(table, ids_of(1))
    table.push(ids_of(1, 2, 1), np.array([[1.0] * 3, [5.0] * 3, [3.0] * 3], np.float32), LR, 0)
    np.testing.assert_allclose(read(table, ids_of(1)), before - 2, rtol=1e-6)


def test_geo_drops_differences_of_ids_not_admitted() -> None:
    table = table_with(CountFilterEntry(2), geo=True)
    table.pull(ids_of(1, 2), insert=True)
    table.pull(ids_of(1), insert=True)
    before = read(table, ids_of(1, 2))
    [rows] = table.exchange(ids_of(1, 2), ones(2), wants=True)
    assert np.array_equal(rows - before, [[1.0] * 3, [0.0] * 3])


def test_admission_is_permanent(tmp_path: Path) -> None:
    table = table_with(CountFilterEntry(2))
    for _ in range(2):
        table.pull(ids_of(1), insert=True)
    table.shrink(0, 0.0, decay=0.1)
    assert saved(table, tmp_path)["meta"].tolist() == [[pytest.approx(0.2), 0.0, 1.0, 1.0]]
    again = table_with(CountFilterEntry(2))
    again.load([tmp_path / "t.safetensors"], ALL)
    for one in (table, again):
        assert learns(one, ids_of(1)) == [True]


def test_probability_entry_admits_ids_at_random() -> None:
    table, ids = table_with(ProbabilityEntry(0.25)), some_ids(4000)
    first = read(table, ids)
    assert np.array_equal(table.pull(ids, insert=True, step=0), first)
    assert len(table) == pytest.approx(1000, rel=0.1)
    assert sum(learns(table, ids)) == len(table)
    before = len(table)
    table.pull(ids, insert=True, step=0)  # the same request again
    assert len(table) == before
    table.pull(ids, insert=True, step=1)
    assert len(table) == pytest.approx(1750, rel=0.1)


def test_random_admission_is_the_same_on_every_server() -> None:
    ids = some_ids(500)
    whole, half = table_with(ProbabilityEntry(0.5)), table_with(ProbabilityEntry(0.5))
    whole.pull(ids, insert=True, step=3)
    half.pull(ids[::-2], insert=True, step=3)
    assert learns(whole, ids[::-2]) == learns(half, ids[::-2])
    assert sum(learns(table_with(ProbabilityEntry(1.0)), ids)) == 0


def test_shows_and_clicks_are_summed(tmp_path: Path) -> None:
    table = table_with(ShowClickEntry())
    shows, clicks = np.array([1, 2, 5], np.float32), np.array([0, 1, 4], np.float32)
    table.push(ids_of(1, 2, 1), ones(3), LR, 0, shows, clicks)
    table.push(ids_of(2), ones(1), LR, 1)
    tensors = saved(table, tmp_path)
    meta = dict(zip(tensors["ids"].tolist(), tensors["meta"].tolist(), strict=True))
    assert meta == {1: [6.0, 4.0, 0.0, 0.0], 2: [2.0, 1.0, 0.0, 0.0]}
    table.shrink(0, 0.0, decay=0.5)
    table.push(ids_of(2), ones(1), LR, 2, ones(1, 1)[0], ones(1, 1)[0])
    tensors = saved(table, tmp_path, "decayed")
    meta = dict(zip(tensors["ids"].tolist(), tensors["meta"].tolist(), strict=True))
    assert meta == {1: [3.0, 2.0, 1.0, 0.0], 2: [2.0, 1.5, 0.0, 0.0]}


def test_rows_with_a_low_score_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "CHUNK_BYTES", 64)
    table = table_with(ShowClickEntry())
    ids = np.arange(20, dtype=np.int64)
    shows, clicks = np.full(20, 10, np.float32), (ids % 4).astype(np.float32)
    first = read(table, ids)
    table.push(ids, ones(20), LR, 0, shows, clicks)
    # worth 0.1 * (10 - clicks) + clicks: 1, 1.9, 2.8 or 3.7
    assert table.shrink(0, 2.0, decay=1.0) == (10, 10)
    assert np.array_equal(read(table, ids[ids % 4 == 0]), first[ids % 4 == 0])
    assert not (read(table, ids[ids % 4 == 2]) == first[ids % 4 == 2]).any()
    assert table.shrink(0, 2.0, decay=0.5) == (10, 0)


def test_rows_unseen_for_long_are_removed() -> None:
    for entry in (CountFilterEntry(1), ProbabilityEntry(1.0), ShowClickEntry()):
        table = table_with(entry)
        table.pull(ids_of(1, 2, 3), insert=True)
        assert table.shrink(2, 0.0, 1.0) == (0, 3)
        table.pull(ids_of(1), insert=True)
        table.pull(ids_of(3), insert=False)
        table.push(ids_of(2), ones(1), LR, 0)
        assert table.shrink(2, 0.0, 1.0) == (0, 3)
        assert table.shrink(2, 0.0, 1.0) == (1, 2)
        assert table.shrink(0, 0.0, 1.0) == (0, 2)


def test_unknown_entries_are_refused() -> None:
    with pytest.raises(PlanError, match=r"entry 'cuont': did you mean 'count'"):
        make(entry=EntryPlan("cuont"))


# Tables with a maximum of rows, compared with a dict that sorts all its rows.


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
    table = Table(capped("age").plan, 7, server_num=4)
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


# A table whose ids are admitted by the scores of another one, as the vectors of a CTR table.


THRESHOLD = 0.25
FIRST = read(make(name="deep"), np.arange(20))
one_step = st.lists(
    st.tuples(st.integers(0, 19), st.integers(0, 1)),
    min_size=1,
    max_size=8,
    unique_by=lambda x: x[0],
)
days = st.lists(st.lists(one_step, max_size=6), max_size=5)


def pair(**deep: Any) -> tuple[Table, Table]:
    """A wide table that counts, and a deep one that it admits ids of."""
    plans = [
        # the order of tables does not matter
        table_plan(name="deep", entry=ScoreEntry(THRESHOLD, "wide").plan, **deep),
        table_plan(name="wide", dim=1, entry=ShowClickEntry().plan, memory=deep.get("memory", 0)),
    ]
    plan = Plan(
        mode="async", worker_num=1, server_num=1, seed=7, tables=plans, dense=[], optimizers=[]
    )
    deep_table, wide = ServerState(plan, 0, [], []).tables
    return wide, deep_table


def step(wide: Table, deep: Table, ids: Ids, clicks: Floats) -> None:
    for table in (wide, deep):
        table.pull(ids, insert=True)
    wide.push(ids, ones(len(ids), 1), LR, 0, np.ones(len(ids), np.float32), clicks)
    deep.push(ids, ones(len(ids)), LR, 0)


@dataclasses.dataclass
class Value:
    """A value of a CTR table, in the words of its accessor."""

    show: float = 0.0
    click: float = 0.0
    unseen_days: int = 0
    embed_w: float = 0.0
    #: None: not created yet
    embedx_steps: int | None = None

    @property
    def score(self) -> float:
        return (self.show - self.click) * 0.1 + self.click

    def step(self, click: int) -> None:
        if self.embedx_steps is None and self.score >= THRESHOLD - 1e-6:
            # the pull creates the vector
            self.embedx_steps = 0
        if self.embedx_steps is not None:
            self.embedx_steps += 1
        self.show, self.click, self.unseen_days = self.show + 1, self.click + click, 0
        self.embed_w -= LR["lr"]


@settings(deadline=None, max_examples=40)
@given(days=days, memory=st.sampled_from([0, 1]))
def test_wide_and_deep_rows_are_those_of_a_ctr_table(days: Any, memory: int) -> None:
    wide, deep = pair(memory=memory)
    values: dict[int, Value] = {}
    first = read(make(name="wide", dim=1), np.arange(20))
    for day in days:
        for batch in day:
            ids, clicks = (np.array(column) for column in zip(*batch, strict=True))
            step(wide, deep, ids.astype(np.int64), clicks.astype(np.float32))
            for i, click in batch:
                values.setdefault(i, Value()).step(click)
        wide.shrink(2, 0.08, 0.9)
        for value in values.values():
            value.show, value.click = value.show * 0.9, value.click * 0.9
            value.unseen_days += 1
        values = {
            i: v for i, v in values.items() if v.unseen_days <= 2 and not v.score < 0.08 - 1e-6
        }
        assert len(wide) == len(values)
        assert len(deep) == sum(v.embedx_steps is not None for v in values.values())
        for i, value in values.items():
            assert read(wide, ids_of(i))[0, 0] == pytest.approx(first[i, 0] + value.embed_w)
            steps = value.embedx_steps or 0
            assert read(deep, ids_of(i))[0] == pytest.approx(FIRST[i] - LR["lr"] * steps, abs=1e-5)
        unknown = np.array([i for i in range(20) if i not in values], np.int64)
        assert same(read(deep, unknown), FIRST[unknown])


def test_a_row_leaves_with_that_of_the_other_table(tmp_path: Path) -> None:
    wide, deep = pair()
    for _ in range(3):
        step(wide, deep, ids_of(*range(6)), np.ones(6, np.float32))
    assert len(deep) == 6
    deep.cut_changes(whole=True)
    deep.settle_changes(published=True)
    cut = deep.cut()
    step(wide, deep, ids_of(0, 1), np.ones(2, np.float32))
    assert wide.shrink(0, 3.5, 1.0) == (4, 2)
    assert len(deep) == 2
    assert set(deep.cut_changes(whole=False).removed.tolist()) == {2, 3, 4, 5}
    deep.save(cut, 0, tmp_path, "deep")
    deep.load([tmp_path / "deep"], None)
    assert len(deep) == 6, "the save has the rows that left meanwhile"


def test_a_maximum_of_rows_of_the_vectors() -> None:
    wide, deep = pair(max_rows=10, evict="age")
    for start in range(10):
        for _ in range(2):
            step(wide, deep, np.arange(start, start + 5), np.ones(5, np.float32))
    assert len(wide) == 14
    assert len(deep) <= 10
    assert deep.plan.is_counted
    assert (deep._rows.find(np.arange(9, 14)) >= 0).all()


def test_pulls_and_shrinks_do_not_wait_for_each_other_forever() -> None:
    """A pull of one table and a shrink of the other need both locks."""
    wide, deep = pair()
    ids, over = np.arange(300), threading.Event()

    def pulls() -> None:
        while not over.is_set():
            deep.pull(ids, insert=True)

    thread = threading.Thread(target=pulls)
    thread.start()
    for _ in range(30):
        wide.push(ids, ones(300, 1), LR, 0, np.full(300, 9, np.float32))
        wide.shrink(0, 10.0, 1.0)
    over.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(deep) == len(wide) == 0


def test_vectors_have_no_counts_of_their_own() -> None:
    _, deep = pair()
    assert deep._rows.meta_width == 0
    assert not deep.plan.is_read_ahead
    with pytest.raises(PlanError, match="no counts to shrink it by"):
        deep.shrink(1, 0.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((0, "wide"), "got score=0, expected a number above 0"),
        ((float("nan"), "wide"), "got score=nan"),
        ((1, ""), "got table='', expected the name of a table"),
    ],
)
def test_invalid_entries_are_refused(arguments: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ScoreEntry(*arguments)
    assert repr(ScoreEntry(10, "wide")) == "ScoreEntry(10, 'wide')"
