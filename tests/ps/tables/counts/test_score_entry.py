# SPDX-License-Identifier: Apache-2.0
"""A table whose ids are admitted by the scores of another one, as the vectors of a CTR table."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.batches import same
from tests.ps.made_tables import LR, ids_of, make, ones, read, table_plan

from fleetlight.errors import ConfigError, PlanError
from fleetlight.ps.layers.entries import ScoreEntry, ShowClickEntry
from fleetlight.ps.plan import Plan
from fleetlight.ps.tables.server_state import ServerState
from fleetlight.ps.tables.table import Table
from fleetlight.ps.update import Floats, Ids

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
