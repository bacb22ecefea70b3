# SPDX-License-Identifier: Apache-2.0
"""`UnorderedSnapshot`: a copy-on-write snapshot of a table, in any order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels import Batch, PendingRows, RowTable, copy_rows
from fleetlight.ps.tables.ordered_snapshot import Lock
from fleetlight.ps.tables.table_file import Pause, no_pause
from fleetlight.ps.update import Floats, Ids

#: the number of batches allocated in advance
_SPARE = 2


class UnorderedSnapshot:
    """Takes each row once: before its first change, or else when `pieces` reaches it.

    That is less work than an `OrderedSnapshot`: taken rows wait in a few batches until they are
    written, without an index. Callers of `keep` hold the table's lock; `pieces` takes it for short
    times.
    """

    #: None: rows are in no order
    starts: NDArray[np.int64] | None = None
    #: it is not for checkpoints
    removed: Ids | None = None

    def __init__(self, table: RowTable, size: int, marks: NDArray[np.uint32] | None = None) -> None:
        """Cut the table, or its marked rows; `pieces` reads `size` rows at a time."""
        self._table = table
        self._size = max(1, min(size, table.top))
        self._untaken = PendingRows(table.top, marks)
        self._count = len(table) if marks is None else self._untaken.left
        #: numbers of rows without an id at the cut
        self._freed = table.freed.copy()
        self._full: list[Batch] = []
        self._spare: list[Batch] = []
        self._batch = self._new_batch()

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use, without the table."""
        batches = [self._batch, *self._full, *self._spare]
        held = sum(batch.nbytes for batch in batches)
        return held + self._untaken.nbytes + int(self._freed.nbytes)

    def keep(self, numbers: NDArray[np.integer], ids: Ids | None = None) -> None:
        """Take rows in use before they change; numbers may repeat, and -1 is skipped.

        Passing `ids` saves a lookup.
        """
        if not self._untaken.left:
            return
        wanted: Ids = numbers.astype(np.int64, copy=False)
        if ids is None:
            wanted = wanted[wanted >= 0]
            ids = self._table.ids_of(wanted)
        start = 0
        rows, at = self._table.stored(wanted)
        while start < len(wanted):
            start = self._untaken.take(rows, wanted, ids, start, self._batch, at)
            if self._batch.is_full:
                # if memory runs out here, the full batch stays and the next call tries again
                fresh = self._spare.pop() if self._spare else self._new_batch()
                self._full.append(self._batch)
                self._batch = fresh

    def make_room(self) -> None:
        """Allocate batches in advance; called repeatedly, without the lock."""
        while len(self._spare) < _SPARE:
            batch = self._new_batch()
            batch.rows.fill(0)
            self._spare.append(batch)

    def prepare(self, lock: Lock, pause: Pause = no_pause) -> None:
        """Do nothing: the rows need no order."""

    def pieces(self, lock: Lock) -> Iterator[tuple[Ids, Floats]]:
        """All rows, with their ids; a piece is valid until the next is read."""
        was_freed = np.zeros(len(self._untaken), np.bool_)
        was_freed[self._freed] = True
        order = self._table.reading_order(len(self._untaken))
        start, is_last = 0, False
        while not is_last:
            with lock:
                batches, self._full = self._full, []
                if not batches:
                    stop = min(start + self._size, len(self._untaken))
                    is_last = start == stop
                    # writers take no rows after the last one
                    batches = [
                        self._batch if is_last else self._rest(start, stop, order, was_freed)
                    ]
                    start = stop
            for batch in batches:
                yield _without(was_freed, batch)
                batch.used = 0
                self._spare.append(batch)

    def _rest(
        self, start: int, stop: int, order: Ids | None, was_freed: NDArray[np.bool_]
    ) -> Batch:
        """Take the pending rows from start to stop, of the order or of all numbers."""
        if order is None:
            numbers = self._untaken.take_between(start, stop)
        else:
            numbers = self._untaken.take_listed(order[start:stop])
        # a freed row that got an id after the cut is not in the snapshot
        numbers = numbers[~was_freed[numbers]]
        batch = self._spare.pop() if self._spare else self._new_batch()
        batch.used = len(numbers)
        batch.numbers[: batch.used] = numbers
        batch.ids[: batch.used] = self._table.ids_of(numbers)
        rows, at = self._table.stored(numbers)
        copy_rows(rows, at, batch.rows[: batch.used])
        return batch

    def _new_batch(self) -> Batch:
        return Batch.empty(self._size, self._table.row_width)


def _without(was_freed: NDArray[np.bool_], batch: Batch) -> tuple[Ids, Floats]:
    """A batch without the rows that had no id at the cut."""
    ids, rows = batch.ids[: batch.used], batch.rows[: batch.used]
    out = was_freed[batch.numbers[: batch.used]]
    return (ids[~out], rows[~out]) if out.any() else (ids, rows)


def get_ready() -> None:
    """Compile the kernels before the first cut, so that no thread waits for them."""
    table = RowTable(1, "sgd")
    table.insert([1])
    sweep = UnorderedSnapshot(table, 1)
    sweep.keep(table.numbers)
    list(sweep.pieces(contextlib.nullcontext()))
