# SPDX-License-Identifier: Apache-2.0
"""UnorderedSnapshot: its memory cost; its consistency is tested in test_ordered_snapshot."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from fleetlight.kernels import RowTable
from fleetlight.ps.tables.unordered_snapshot import UnorderedSnapshot

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
