# SPDX-License-Identifier: Apache-2.0
"""Admission: which ids get rows that learn, what is counted, and which rows are removed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.ps.made_tables import ALL, LR, ids_of, make, ones, read, saved, some_ids

from fleetlight.errors import PlanError
from fleetlight.ps.layers.entries import (
    CountFilterEntry,
    EntryPolicy,
    ProbabilityEntry,
    ShowClickEntry,
)
from fleetlight.ps.plan import EntryPlan
from fleetlight.ps.tables import table as table_module
from fleetlight.ps.tables.table import Table
from fleetlight.ps.update import Ids


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
