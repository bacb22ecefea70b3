# SPDX-License-Identifier: Apache-2.0
"""Tables with few rows in memory, compared to the bit with tables in memory."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.kernels.batches import numbers, same
from tests.ps.made_tables import LR, by_id, make, ones, read, saved, some_ids

from fleetlight.errors import RowFileError
from fleetlight.kernels import TieredRowTable
from fleetlight.ps.plan import EntryPlan
from fleetlight.ps.tables.publishing.table_changes import TableCut
from fleetlight.ps.tables.table import Table
from fleetlight.ps.update import Floats, Ids

DIM = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adagrad": {"eps": 1e-8},
    "rowwise_adagrad": {"eps": 1e-8},
    "adam": {"eps": 1e-8, "betas": (0.9, 0.99)},
}
EVERY: Ids = np.arange(120, dtype=np.int64)
ENTRIES = [None, EntryPlan("count", 2.0), EntryPlan("probability", 0.5), EntryPlan("show_click")]
batches = st.lists(st.sampled_from(EVERY.tolist()), max_size=60).map(
    lambda ids: np.array(ids, np.int64)
)


class Served:
    """The rows that a service has: those of a publication, and of the changes after it."""

    def __init__(self) -> None:
        self.by_id: dict[int, Floats] = {}

    def take(self, cut: TableCut, pieces: Iterable[tuple[Ids, Floats]], is_delta: bool) -> None:
        if not is_delta:
            self.by_id = {}
        for i in cut.removed.tolist():
            self.by_id.pop(i, None)
        for ids, rows in pieces:
            self.by_id.update(zip(ids.tolist(), rows.copy(), strict=True))

    def rows(self, ids: Ids, unknown: Floats) -> Floats:
        return np.array(
            [self.by_id.get(i, first) for i, first in zip(ids.tolist(), unknown, strict=True)]
        )


class Both(RuleBasedStateMachine):
    """Makes the same calls to both tables."""

    @initialize(
        name=st.sampled_from(sorted(OPTIONS)),
        entry=st.sampled_from(ENTRIES),
        dtype=st.sampled_from(["fp32", "bf16"]),
        geo=st.booleans(),
    )
    def begin(self, name: str, entry: EntryPlan | None, dtype: str, geo: bool) -> None:
        self.plain, self.tiered = (
            make(name, geo, entry=entry, dtype=dtype, memory=memory) for memory in (0, 1)
        )
        self.name, self.geo, self.entry, self.step = name, geo, entry, 0
        self.cuts: list[Any] = []
        self.publications: list[Any] = []
        self.served = Served(), Served()
        self.unknown = make(name, geo, dtype=dtype)
        self.folder = Path(tempfile.mkdtemp())

    def both(self, act: Any) -> tuple[Any, Any]:
        return act(self.plain), act(self.tiered)

    @rule(ids=batches, insert=st.booleans())
    def pull(self, ids: Ids, insert: bool) -> None:
        self.step += 1
        assert same(*self.both(lambda table: table.pull(ids, insert, self.step)))

    @rule(ids=batches)
    def push(self, ids: Ids) -> None:
        self.step += 1
        gradients, counts = numbers(self.step, len(ids), DIM), np.ones(len(ids), np.float32)
        counted = (counts, counts) if self.entry is not None and len(ids) % 2 else (None, None)
        options = {**LR, **OPTIONS[self.name]}
        self.both(lambda table: table.push(ids, gradients, options, self.step, *counted))

    @precondition(lambda self: self.geo)
    @rule(ids=st.sets(st.sampled_from(EVERY.tolist())))
    def exchange(self, ids: set[int]) -> None:
        self.step += 1
        some, added = np.array(sorted(ids), np.int64), numbers(self.step, len(ids), DIM)
        found = self.both(lambda t: t.exchange(some, added.copy(), wants=True, step=self.step))
        assert same(found[0][0], found[1][0])

    @rule(ids=batches)
    def fill(self, ids: Ids) -> None:
        self.both(lambda table: table.fill(ids, numbers(len(ids), len(ids), DIM)))

    @rule()
    def reset(self) -> None:
        self.both(lambda table: table.reset())

    @precondition(lambda self: self.entry is not None)
    @rule(unseen=st.integers(0, 2), score=st.sampled_from([0.0, 0.11]))
    def shrink(self, unseen: int, score: float) -> None:
        plain, tiered = self.both(lambda table: table.shrink(unseen, score, 0.5))
        assert plain == tiered

    @rule(ordered=st.booleans())
    def cut(self, ordered: bool) -> None:
        self.cuts = [*self.both(lambda table: table.cut(ordered=ordered))]

    @precondition(lambda self: self.cuts)
    @rule(loads=st.booleans())
    def save(self, loads: bool) -> None:
        """A cut that later calls have changed rows of."""
        self.step += 1
        plain, tiered = (f"{name}{self.step}" for name in ("plain", "tiered"))
        self.plain.save(self.cuts[0], 0, self.folder, plain)
        self.tiered.save(self.cuts[1], 0, self.folder, tiered)
        if self.cuts[0].starts is not None:
            files = [(self.folder / name).read_bytes() for name in (plain, tiered)]
            assert files[0] == files[1]
        if loads:
            for table, path in ((self.plain, tiered), (self.tiered, plain)):
                table.load([self.folder / path], None)
            self.publications = []
        self.cuts = []

    @rule(delta=st.booleans())
    def cut_publication(self, delta: bool) -> None:
        """Of the changes since the last one, or of all rows; one before it becomes none."""
        known = [table.changes().is_complete for table in (self.plain, self.tiered)]
        assert known[0] == known[1]
        self.is_delta = delta and known[0] and not self.publications
        self.publications = [*self.both(lambda table: table.cut_changes(whole=not self.is_delta))]
        self.expected = read(self.plain, EVERY)

    @precondition(lambda self: self.publications)
    @rule(reads=st.booleans())
    def publish(self, reads: bool) -> None:
        """A publication that later calls have changed rows of, or one that fails."""
        tables = self.plain, self.tiered
        for table, cut, served in zip(tables, self.publications, self.served, strict=True):
            pieces = list(table.published_pieces(cut)) if reads else []
            if reads:
                served.take(cut, pieces, self.is_delta)
                assert same(served.rows(EVERY, read(self.unknown, EVERY)), self.expected)
            table.settle_changes(published=reads)
        self.publications = []

    @invariant()
    def same_rows(self) -> None:
        assert len(self.plain) == len(self.tiered)
        assert same(*self.both(lambda table: table.pull(EVERY, insert=False)))

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        files = [saved(table, self.folder / n) for n, table in enumerate_both(self)]
        assert by_id(files[:1]) == by_id(files[1:])


def enumerate_both(both: Both) -> list[tuple[str, Table]]:
    return [("last plain", both.plain), ("last tiered", both.tiered)]


TestBoth = Both.TestCase
TestBoth.settings = settings(deadline=None, max_examples=25, stateful_step_count=20)


def test_memory_is_a_limit_of_rows(tmp_path: Path) -> None:
    table = make(memory=40 * (4 * DIM + 13))
    table.fill(some_ids(1000), ones(len(some_ids(1000))))
    rows = table._rows
    assert isinstance(rows, TieredRowTable)
    assert len(rows._slots) == 40
    assert (read(table, some_ids(1000)) == 1).all()


def test_a_full_disk_fails_a_push_that_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlight.ps.tables.tier.kinds.RowLog", without_patience)
    table, ids = make("adagrad", memory=1), np.arange(100)
    table.fill(ids, ones(100))
    done = 0

    def push_some() -> None:
        nonlocal done
        while done < 100:
            some = ids[done : done + 8]
            table.push(some, ones(len(some)), {**LR, "eps": 0.0}, 0)
            done += 8

    with monkeypatch.context() as patch:

        def full(file: int, data: Any, offset: int) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "pwrite", full)
        with pytest.raises(RowFileError, match=r"table 'emb'.*: No space left on device; make"):
            push_some()
    push_some()
    assert (read(table, ids) == 0.5).all()


def without_patience(*about: Any) -> Any:
    from fleetlight.ps.tables.tier.row_log import RowLog

    return RowLog(*about, patience_s=0.0)


def test_a_delta_has_rows_of_the_file_and_the_ids_that_lost_theirs() -> None:
    served, unknown = Served(), read(make(), EVERY)
    table = make("adagrad", entry=EntryPlan("show_click"), memory=1)
    for whole, changed in ((True, EVERY), (False, EVERY[::3]), (False, EVERY[5:50])):
        counts = np.ones(len(changed), np.float32)
        table.push(changed, ones(len(changed)), {**LR, "eps": 1e-8}, 0, counts, counts)
        if not whole:
            # those that the last push did not have
            assert table.shrink(0, 1.0, 0.5)[0] > 0
        cut, expected = table.cut_changes(whole=whole), read(table, EVERY)
        # changes and removals after the cut are not in it
        table.push(EVERY[::2], ones(60), {**LR, "eps": 1e-8}, 1, np.ones(60, np.float32))
        table.shrink(0, 0.3, 1.0)
        served.take(cut, table.published_pieces(cut), not whole)
        assert same(served.rows(EVERY, unknown), expected)
        table.settle_changes(published=True)
