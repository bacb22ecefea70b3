# SPDX-License-Identifier: Apache-2.0
"""Tables with few rows in memory, compared to the bit with tables in memory."""

from __future__ import annotations

import errno
import os
import tempfile
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
from fleetlight.ps.tables.table import Table
from fleetlight.ps.update import Ids

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
        self.cuts = []

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
    monkeypatch.setattr("fleetlight.ps.tables.table.RowLog", without_patience)
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
