# SPDX-License-Identifier: Apache-2.0
"""`TableChanges`: the rows that changed and the ids that lost their row since a publication."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels import ChangedRows, RowTable
from fleetlight.ps.tables.ordered_snapshot import Lock
from fleetlight.ps.tables.unordered_snapshot import UnorderedSnapshot
from fleetlight.ps.update import Floats, Ids

_NO_IDS: Ids = np.empty(0, np.int64)


@dataclasses.dataclass(frozen=True)
class TableCut:
    """What a publication has of one table: rows at the cut, and ids without a row."""

    rows: UnorderedSnapshot
    #: since the last publication; some may have a row again
    removed: Ids
    #: the marks that the cut took
    marks: NDArray[np.uint32]
    #: whether the marks before it were of all changes
    was_complete: bool

    def pieces(self, lock: Lock) -> Iterator[tuple[Ids, Floats]]:
        """The rows, with their ids; a piece is valid until the next is read."""
        return self.rows.pieces(lock)


class TableChanges:
    """Exists only where a table is published. Callers hold the table's lock."""

    def __init__(self, rows: RowTable, size: int) -> None:
        """A cut is read `size` rows at a time."""
        self._rows, self._size = rows, size
        self._changed = ChangedRows()
        self._removed: list[Ids] = []
        #: the marks are of all changes since the last cut that was published
        self.is_complete = False
        self._cut: TableCut | None = None

    def __len__(self) -> int:
        """How many rows changed, and how many were removed."""
        return len(self._changed) + sum(map(len, self._removed))

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        cut = 0 if self._cut is None else self._cut.rows.nbytes + self._cut.marks.nbytes
        return self._changed.nbytes + sum(ids.nbytes for ids in self._removed) + cut

    def keep(self, numbers: NDArray[np.integer], ids: Ids | None = None) -> None:
        """Let the cut keep these rows before they change."""
        if self._cut is not None:
            self._cut.rows.keep(numbers, ids)

    def mark(self, numbers: NDArray[np.integer]) -> None:
        """Mark rows whose weights are about to change."""
        self._changed.mark(numbers.astype(np.int64, copy=False), self._rows.top)

    def remove(self, numbers: NDArray[np.int64]) -> None:
        """Note the ids of rows that are about to be removed."""
        self._removed.append(self._rows.ids_of(numbers))
        self._changed.clear(numbers)

    def cut(self, *, whole: bool) -> TableCut:
        """Cut the rows that changed, or all; the changes after it are marked again."""
        self.settle(published=False)
        marks, removed = self._changed.take(), np.concatenate([_NO_IDS, *self._removed])
        rows = UnorderedSnapshot(self._rows, self._size, None if whole else marks)
        self._cut = TableCut(rows, removed, marks, self.is_complete)
        self._removed, self.is_complete = [], True
        return self._cut

    def settle(self, *, published: bool) -> None:
        """End the cut, if there is one; what was not published belongs to the next."""
        cut, self._cut = self._cut, None
        if cut is None or published:
            return
        self._changed.give_back(cut.marks)
        self._removed.insert(0, cut.removed)
        self.is_complete &= cut.was_complete
