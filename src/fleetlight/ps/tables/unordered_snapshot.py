# SPDX-License-Identifier: Apache-2.0
"""`UnorderedSnapshot`: the rows of a table as they were at one moment, in any order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels import Batch, PendingRows, RowTable, copy_rows
from fleetlight.ps.tables.ordered_snapshot import Lock
from fleetlight.ps.tables.table_file import Pause, no_pause
from fleetlight.ps.update import Floats, Ids

#: so many batches are there before they are needed
_SPARE = 2


class UnorderedSnapshot:
    """Each row goes to the file once: before it changes first, or else when its turn comes.

    That is less work than a `Snapshot`, which brings all of them in order: rows that were taken
    wait in a few batches until they are written, without an index.

    The table's lock is held around `keep`; `pieces` takes it again and again.
    """

    #: rows are in no order
    starts: NDArray[np.int64] | None = None

    def __init__(self, table: RowTable, size: int) -> None:
        """Read it `size` rows at a time."""
        self._table = table
        self._size = max(1, min(size, len(table.rows)))
        self._count = len(table)
        self._untaken = PendingRows(len(table.rows))
        #: of rows that hold no id now
        self._freed = table.freed.copy()
        self._full: list[Batch] = []
        self._spare: list[Batch] = []
        self._batch = self._new_batch()

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of memory it holds beside the table."""
        batches = [self._batch, *self._full, *self._spare]
        held = sum(batch.nbytes for batch in batches)
        return held + self._untaken.nbytes + int(self._freed.nbytes)

    def keep(self, numbers: NDArray[np.integer], ids: Ids | None = None) -> None:
        """Rows in use are about to change; numbers may repeat, and -1 is no row.

        Who knows their ids saves looking them up.
        """
        if not self._untaken.left:
            return
        wanted: Ids = numbers.astype(np.int64, copy=False)
        if ids is None:
            wanted = wanted[wanted >= 0]
            ids = self._table.ids_of(wanted)
        start = 0
        while start < len(wanted):
            start = self._untaken.take(self._table.rows, wanted, ids, start, self._batch)
            if self._batch.is_full:
                # where there is no memory for it, the full one stays, and the next call tries again
                fresh = self._spare.pop() if self._spare else self._new_batch()
                self._full.append(self._batch)
                self._batch = fresh

    def make_room(self) -> None:
        """Have memory there for rows that will change; called now and then, without the lock."""
        while len(self._spare) < _SPARE:
            batch = self._new_batch()
            batch.rows.fill(0)
            self._spare.append(batch)

    def prepare(self, lock: Lock, pause: Pause = no_pause) -> None:
        """Nothing has to be found out before rows are read."""

    def pieces(self, lock: Lock) -> Iterator[tuple[Ids, Floats]]:
        """All rows, with their ids; a piece is good until the next is asked for."""
        was_freed = np.zeros(len(self._untaken), np.bool_)
        was_freed[self._freed] = True
        start, is_last = 0, False
        while not is_last:
            with lock:
                batches, self._full = self._full, []
                if not batches:
                    stop = min(start + self._size, len(self._untaken))
                    is_last = start == stop
                    # writers take no more rows once the last is taken
                    batches = [self._batch if is_last else self._rest(start, stop, was_freed)]
                    start = stop
            for batch in batches:
                yield _without(was_freed, batch)
                batch.used = 0
                self._spare.append(batch)

    def _rest(self, start: int, stop: int, was_freed: NDArray[np.bool_]) -> Batch:
        """Rows that were not changed yet."""
        numbers = self._untaken.take_between(start, stop)
        # one that got an id since then is not in it either
        numbers = numbers[~was_freed[numbers]]
        batch = self._spare.pop() if self._spare else self._new_batch()
        batch.used = len(numbers)
        batch.numbers[: batch.used] = numbers
        batch.ids[: batch.used] = self._table.ids_of(numbers)
        copy_rows(self._table.rows, numbers, batch.rows[: batch.used])
        return batch

    def _new_batch(self) -> Batch:
        return Batch.empty(self._size, self._table.width)


def _without(was_freed: NDArray[np.bool_], batch: Batch) -> tuple[Ids, Floats]:
    """A batch but for rows that held no id at the cut."""
    ids, rows = batch.ids[: batch.used], batch.rows[: batch.used]
    out = was_freed[batch.numbers[: batch.used]]
    return (ids[~out], rows[~out]) if out.any() else (ids, rows)


def get_ready() -> None:
    """Compile the kernels before the first cut, while no thread waits for them."""
    table = RowTable(1, "sgd")
    table.insert([1])
    sweep = UnorderedSnapshot(table, 1)
    sweep.keep(table.numbers)
    list(sweep.pieces(contextlib.nullcontext()))
