# SPDX-License-Identifier: Apache-2.0
"""The index during growth: its contents, and the share of the work that each operation does."""

import numpy as np
import pytest

from fleetlight.kernels import RowTable
from fleetlight.kernels.rows import index as index_module
from fleetlight.kernels.rows.index import Index


def growing_table(monkeypatch: pytest.MonkeyPatch) -> RowTable:
    """A table of 800 rows whose index starts to grow."""
    monkeypatch.setattr(index_module, "_MOVES", 0)
    monkeypatch.setattr(index_module, "_LOOKED_FOR", 10**9)
    table = RowTable(1, "sgd")
    table.insert(np.arange(800))
    assert table.growing
    assert len(table._index.old) == 2 * 1024
    return table


def test_each_operation_moves_a_bounded_number_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    table = growing_table(monkeypatch)
    monkeypatch.setattr(index_module, "_MOVES", 10)
    monkeypatch.setattr(index_module, "_LOOKED_FOR", 4)
    moved = []
    while table.growing:
        moved.append(table._index.moved)
        table.pull(np.arange(20))
    assert np.diff(moved).tolist() == [8 * (10 + 20 // 4)] * (len(moved) - 1)
    assert (table.find(np.arange(800)) == np.arange(800)).all()


def test_growth_finishes_before_the_next_one_starts() -> None:
    index = Index(50_000)
    index.grow()
    lines = len(index.old) // 8
    index.inserted(lines // 2, 0)
    assert index.moved == len(index.old) // 2
    index.inserted(lines // 2, 0)
    assert not len(index.old)
    # a growth adds as many ids as the old index could hold, which is more than it has lines
    assert lines < index.limit - index.limit // 2


def test_rows_removed_and_inserted_during_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    table = growing_table(monkeypatch)
    table._index._move(100)
    assert table.remove(np.arange(0, 800, 2)) == 400
    assert table.remove(np.arange(0, 800, 2)) == 0
    assert (table.find(np.arange(0, 800, 2)) == -1).all()
    reused = table.insert([0, 2, 4])
    assert sorted(reused) == [794, 796, 798]
    table._index._move(10_000)
    assert (table.find([0, 2, 4]) == reused).all()
    assert (table.find(np.arange(1, 800, 2)) == np.arange(1, 800, 2)).all()
    assert len(table) == 403 == len(table.ids_of(table.numbers))


def test_next_index_is_allocated_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(100_000)
    asked = []
    zeros = index_module.memory.zeros
    monkeypatch.setattr(
        index_module.memory, "zeros", lambda n, dtype: asked.append(n) or zeros(n, dtype)
    )
    before = index.nbytes
    index.inserted(1000, int(index.limit * 0.89))
    assert index.nbytes == before
    first = int(index.limit * 0.9) + 1
    index.inserted(100, first)
    assert index.nbytes == before + 100 * 64 * 8
    for live in range(first, index.limit, 100):
        index.inserted(100, live)
    assert index.nbytes == 3 * before
    slots = len(index.slots)
    index.grow()
    assert len(index.slots) == 2 * slots
    assert asked == [2 * slots]
    assert index.nbytes == 3 * before


def test_index_is_sized_by_the_hint() -> None:
    assert Index().limit == 716
    assert 10_000_000 <= Index(10_000_000).limit < 12_000_000


def test_inserts_prepare_the_next_index() -> None:
    table = RowTable(1, "sgd")
    ready = []
    for start in range(0, 714, 7):
        table.insert(np.arange(start, start + 7))
        ready.append(table._index.nbytes)
    assert ready[0] < ready[-1] == 3 * ready[0]
