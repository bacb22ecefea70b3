# SPDX-License-Identifier: Apache-2.0
"""`UnsavedRows`: the rows that changed and the ids that lost their row since a base.

A base is a save that has all rows. Rows that the base does not have are found by their numbers, so
pulls that add rows mark nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels import ChangedRows, RowTable, are_marked, marks_from
from fleetlight.ps.update import Ids


class UnsavedRows:
    """The changes since one base. Callers hold the table's lock."""

    def __init__(self, rows: RowTable, base: str) -> None:
        """`base`: the name of the save that is being cut."""
        self.base, self._rows = base, rows
        self._changed = ChangedRows()
        #: rows that the base does not have, beside those from `_first_new` on
        self._new = ChangedRows()
        self._first_new = rows.top
        self._new.mark(rows.freed.astype(np.int64), self._first_new)
        self._removed: list[Ids] = []

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return self._changed.nbytes + self._new.nbytes + sum(ids.nbytes for ids in self._removed)

    def mark(self, numbers: NDArray[np.integer]) -> None:
        """Mark rows that are about to change; -1 is skipped."""
        self._changed.mark(numbers.astype(np.int64, copy=False), self._rows.top)

    def remove(self, numbers: NDArray[np.int64]) -> None:
        """Note the ids of rows that are about to be removed."""
        old = numbers[numbers < self._first_new]
        old = old[~are_marked(self._new.of(self._first_new), old)]
        self._removed.append(self._rows.ids_of(old))
        self._new.mark(old, self._first_new)

    def absorb(self, later: UnsavedRows) -> None:
        """Add the changes since a later base that was not saved; removals are noted in both."""
        self._changed.give_back(later._changed.take())

    def delta(self) -> tuple[NDArray[np.uint32], Ids]:
        """The marks of rows that changed or that the base does not have, and ids without a row."""
        count, found = self._rows.top, ChangedRows()
        for marks in (
            self._changed.of(count),
            self._new.of(count),
            marks_from(self._first_new, count),
        ):
            found.give_back(marks)
        found.clear(self._rows.freed.astype(np.int64))
        removed = np.concatenate([np.empty(0, np.int64), *self._removed])
        return found.take(), removed


class UnsavedChanges:
    """The changes since the last base, and since one that may not be on disk yet.

    Whether a save succeeded is known at the next one: it names the base that the checkpoint has.
    Exists only where saves need a base. Callers hold the table's lock.
    """

    def __init__(self) -> None:
        self._since: UnsavedRows | None = None
        #: since a base whose save has not been confirmed
        self._next: UnsavedRows | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return sum(one.nbytes for one in (self._since, self._next) if one is not None)

    def mark(self, numbers: NDArray[np.integer]) -> None:
        """Mark rows that are about to change; -1 is skipped."""
        newest = self._next or self._since
        if newest is not None:
            newest.mark(numbers)

    def remove(self, numbers: NDArray[np.int64]) -> None:
        """Note the ids of rows that are about to be removed."""
        for one in (self._since, self._next):
            if one is not None:
                one.remove(numbers)

    def settle(self, base: str) -> bool:
        """Take over the base that the checkpoint has; whether all changes since are known."""
        before, after = self._since, self._next
        self._next = None
        if after is not None and after.base == base:
            self._since = after
        elif before is None or before.base != base:
            self._since = None
        elif after is not None:
            before.absorb(after)
        return self._since is not None

    def begin(self, rows: RowTable, base: str) -> None:
        """Mark the changes since a new base, which is being cut."""
        self._next = UnsavedRows(rows, base)

    def delta(self) -> tuple[NDArray[np.uint32], Ids]:
        """See `UnsavedRows`; `settle` knew the base."""
        assert self._next is None, "the base is not settled"
        assert self._since is not None, "no base is known"
        return self._since.delta()


def get_ready() -> None:
    """Compile the kernels before the first cut, so that no thread waits for them."""
    none, changed = np.empty(0, np.int64), ChangedRows()
    changed.mark(none, 0)
    changed.clear(none)
