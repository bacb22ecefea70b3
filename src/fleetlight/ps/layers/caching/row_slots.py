# SPDX-License-Identifier: Apache-2.0
"""`RowSlots`: which id is in which slot of a cache, and whether its row may still be used. Pure.

A row is usable until a push changes it, or until it is older than the mode allows. It keeps its
slot then, since its id is likely to be used again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels import RowTable
from fleetlight.ps.update import Ids

Slots = NDArray[np.int64]
#: steps of the slowest worker that a row includes, if the row may not be used
_OUTDATED = -1
#: the share of the slots that one eviction frees: each reads the last use of all rows
_EVICTED = 8


class RowSlots:
    """At most `capacity` ids. Rows that were not used for the longest time leave first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # only the index of this table is used
        self._index = RowTable(1, "sgd")
        #: by slot: how many steps of the slowest worker the row includes
        self._steps = np.full(capacity, _OUTDATED, np.int64)
        #: by slot: the version of the server's values when it sent the row
        self._versions = np.zeros(capacity, np.int64)
        #: by slot: the number of the last lookup that used it
        self._used = np.zeros(capacity, np.int64)
        self._lookups = 0

    def __len__(self) -> int:
        return len(self._index)

    def find(self, ids: Ids, at_least: int) -> Slots:
        """The slot of each distinct id; -1 without a row that includes `at_least` steps."""
        self._lookups += 1
        slots = self._index.find(ids)
        usable = slots >= 0
        usable[usable] = self._steps[slots[usable]] >= at_least
        self._used[slots[usable]] = self._lookups
        return np.where(usable, slots, np.int64(-1))

    def put(self, ids: Ids, steps: int, versions: NDArray[np.int64]) -> Slots:
        """Slots for rows that have arrived; -1 without room."""
        slots = self._index.find(ids)
        self._used[slots[slots >= 0]] = self._lookups
        new = np.flatnonzero(slots < 0)
        new = new[: self._room(len(new))]
        slots[new] = self._index.insert(ids[new])
        has_slot = slots >= 0
        mine = slots[has_slot]
        self._steps[mine], self._used[mine] = steps, self._lookups
        self._versions[mine] = versions[has_slot]
        return slots

    def version(self, slots: Slots) -> int | None:
        """The version of the oldest row in these slots; None without a row."""
        mine = slots[slots >= 0]
        return int(self._versions[mine].min()) if len(mine) else None

    def has_others(self, ids: Ids) -> bool:
        """True if there are usable rows of other ids than these distinct ones."""
        slots = self._index.find(ids)
        mine = self._steps[slots[slots >= 0]]
        return int(np.count_nonzero(self._steps >= 0)) > int(np.count_nonzero(mine >= 0))

    def outdate(self, ids: Ids) -> None:
        """These rows have changed."""
        slots = self._index.find(ids)
        self._steps[slots[slots >= 0]] = _OUTDATED

    def outdate_all(self) -> None:
        """All rows may have changed."""
        self._steps.fill(_OUTDATED)

    def _room(self, count: int) -> int:
        """How many of `count` new ids have room."""
        free = self.capacity - len(self)
        if free < count:
            self._evict(count - free)
        return min(count, self.capacity - len(self))

    def _evict(self, count: int) -> None:
        """Free slots, but none of the last lookup: a batch above the capacity keeps its rows."""
        slots = self._index.numbers.astype(np.int64)
        idle = slots[self._used[slots] < self._lookups]
        count = min(len(idle), max(count, self.capacity // _EVICTED))
        if 0 < count < len(idle):
            idle = idle[np.argpartition(self._used[idle], count - 1)[:count]]
        if count:
            self._index.remove(idle)
            self._steps[idle] = _OUTDATED
