# SPDX-License-Identifier: Apache-2.0
"""`OrderedSnapshot`: a copy-on-write snapshot of a table, in bucket order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels import (
    BucketCount,
    RowTable,
    are_marked,
    count_marks,
    lay_aside,
    marks_between,
    put_in_bucket_order,
    read_as_they_were,
)
from fleetlight.kernels.rows import memory
from fleetlight.ps.tables.table_file import Pause, no_pause
from fleetlight.ps.update import Floats, Ids

Lock = contextlib.AbstractContextManager[Any]

#: in `_places`: a row that is not read again; an unchanged row has 0
_DONE = -1
#: memory that is allocated in advance
_ROOM_BYTES = 32 << 20
#: the number of rows listed under one lock
LIST_ROWS = 1 << 16
_NO_ROWS = np.empty(0, np.int32)


class OrderedSnapshot:
    """Copy-on-write: the cut copies nothing; a writer first copies rows that were not read yet.

    Rows added after the cut are not in the snapshot. `prepare` lists its ids later, because row
    numbers do not change, while ids move inside an index. Callers of `keep` and `read` hold the
    table's lock; `prepare` and `pieces` take it for short times, so that training continues.
    """

    ids: Ids
    #: bucket b has the rows from starts[b] to starts[b + 1]
    starts: NDArray[np.int64]

    def __init__(
        self,
        table: RowTable,
        size: int,
        marks: NDArray[np.uint32] | None = None,
        removed: Ids | None = None,
    ) -> None:
        """Cut the table, or its marked rows, all in use; `pieces` reads `size` rows at a time.

        `removed`: the ids that lost their row since the base of the marks.
        """
        self._table, self._size, self._marks, self.removed = table, size, marks, removed
        self._count = len(table) if marks is None else count_marks(marks)
        self._freed = table.freed.copy() if marks is None else _NO_ROWS
        #: by row number; above 0: the place of its copy, counted from 1
        self._places = np.zeros(table.top, np.int32)
        self._aside = _RowCopies(table, table.top)
        self.ids, self._numbers = np.empty(0, np.int64), np.empty(0, np.int32)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use, without the table."""
        arrays = (self.ids, self._numbers, self._places, self._freed, self._marks)
        return self._aside.nbytes + sum(one.nbytes for one in arrays if one is not None)

    def keep(self, numbers: NDArray[np.integer], ids: Ids | None = None) -> None:
        """Copy rows in use before they change; numbers may repeat, and -1 is skipped.

        Passing `ids` saves a lookup.
        """
        if self._marks is not None:
            mine = are_marked(self._marks, numbers.astype(np.int64, copy=False))
            numbers, ids = numbers[mine], None if ids is None else ids[mine]
        self._aside.put(self._places, numbers.astype(np.int64, copy=False), ids)

    def make_room(self) -> None:
        """Allocate memory for copies in advance; called repeatedly, without the lock."""
        self._aside.make_room()

    def prepare(self, lock: Lock, pause: Pause = no_pause) -> None:
        """List the ids of the rows and sort them, before any row is read."""
        counted, done = BucketCount(), 0
        ids, numbers = np.empty(self._count, np.int64), np.empty(self._count, np.int32)
        for some, theirs in self._listed(lock):
            stop = done + len(some)
            ids[done:stop], numbers[done:stop] = theirs, some
            counted.add(theirs)
            done = stop
            pause()
        assert done == self._count, f"{done} rows are listed of {self._count}"
        self.starts = counted.starts
        put_in_bucket_order(self.starts, ids, numbers)
        self.ids, self._numbers = ids, numbers

    def pieces(self, lock: Lock) -> Iterator[tuple[Ids, Floats]]:
        """All rows in bucket order, with their ids; each piece is read once."""
        for start in range(0, self._count, self._size):
            stop = min(start + self._size, self._count)
            with lock:
                rows = self.read(start, stop)
            yield self.ids[start:stop], rows

    def read(self, start: int, stop: int) -> Floats:
        """Rows at the cut, in the order of `ids`; each row is read once."""
        numbers = self._numbers[start:stop].astype(np.int64)
        rows, at = self._table.stored(numbers)
        return read_as_they_were(self._places, rows, self._aside.rows, numbers, _DONE, at)

    def _listed(self, lock: Lock) -> Iterator[tuple[NDArray[np.int64], Ids]]:
        """Row numbers and ids at the cut."""
        for start in range(0, len(self._freed), LIST_ROWS):
            with lock:
                # a freed row that got an id after the cut is not in the snapshot
                self._places[self._freed[start : start + LIST_ROWS]] = _DONE
        self._freed = np.empty(0, self._freed.dtype)
        for start in range(0, len(self._places), LIST_ROWS):
            with lock:
                numbers, ids = self._list(start, start + LIST_ROWS)
            yield numbers, ids
        with lock:
            self._aside.forget_ids()

    def _list(self, start: int, stop: int) -> tuple[NDArray[np.int64], Ids]:
        places = self._places[start:stop]
        wanted = places != _DONE
        if self._marks is not None:
            wanted &= marks_between(self._marks, start, start + len(places))
        numbers = np.flatnonzero(wanted)
        places = places[numbers]
        numbers += start
        moved = places > 0
        ids = np.empty(len(numbers), np.int64)
        # a copied row may have been removed since, and reused for another id
        ids[moved] = self._aside.ids[places[moved] - 1]
        ids[~moved] = self._table.ids_of(numbers[~moved])
        return numbers, ids


def get_ready() -> None:
    """Compile the kernels before the first cut, so that no thread waits for them."""
    table, none = RowTable(1, "sgd"), np.empty(0, np.int64)
    table.ids_of(none)
    lay_aside(np.empty(0, np.int32), table.rows, table.rows, 0, none)


class _RowCopies:
    """Copies of rows and, until all rows are listed, of their ids."""

    def __init__(self, table: RowTable, most: int) -> None:
        self._table = table
        self._used = 0
        #: the number of rows with allocated memory
        self._ready = 0
        self._lists = True
        # reserved, so that it grows to the size of the table without copying
        rows = memory.reserve(most * table.row_width, np.float32)
        ids = memory.reserve(most, np.int64)
        if rows is None or ids is None:
            rows, ids = np.empty(0, np.float32), np.empty(0, np.int64)
        self.rows: Floats = rows.reshape(-1, table.row_width)
        self.ids: Ids = ids

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._used * (4 * self._table.row_width + 8 * self._lists)

    def put(self, places: NDArray[np.int32], numbers: NDArray[np.int64], ids: Ids | None) -> None:
        """Copy rows that have no place yet, and give them places, counted from 1."""
        start = self._used
        most = min(start + len(numbers), len(places))
        if most > len(self.rows):
            self._grow(2 * most)
        rows, at = self._table.stored(numbers)
        fresh = lay_aside(places, rows, self.rows, start, numbers, at)
        self._used = start + len(fresh)
        if self._lists:
            known = self._table.ids_of(numbers[fresh]) if ids is None else ids[fresh]
            self.ids[start : self._used] = known

    def make_room(self) -> None:
        """Allocate memory for the next copies, so that pushes do not wait for it."""
        stop = min(self._used + _ROOM_BYTES // (4 * self._table.row_width), len(self.rows))
        start, self._ready = self._ready, max(stop, self._ready)
        if start < stop:
            memory.populate(self.rows[start:stop])
            if len(ids := self.ids):
                memory.populate(ids[start:stop])

    def forget_ids(self) -> None:
        """Drop the ids, because all rows are listed."""
        self._lists, self.ids = False, np.empty(0, np.int64)

    def _grow(self, count: int) -> None:
        """Copy to larger arrays; needed only if the reservation failed."""
        rows = np.empty((count, self._table.row_width), np.float32)
        rows[: self._used] = self.rows[: self._used]
        self.rows = rows
        if self._lists:
            ids = np.empty(count, np.int64)
            ids[: self._used] = self.ids[: self._used]
            self.ids = ids
