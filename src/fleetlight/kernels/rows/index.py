# SPDX-License-Identifier: Apache-2.0
"""The hash index of a table, and how it grows.

Growing moves no row and stops no thread. New ids enter the larger index at once, every operation
moves some lines of the old index, and a search that fails in the new index continues in the old.

The system clears memory at its first use, and the first ids of a new index would touch all of it.
So the next index is cleared in small parts before the present one is full.
"""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Int64s
from fleetlight.kernels.rows import memory
from fleetlight.kernels.rows.probing import WORDS, migrate

#: the maximum load factor; above it, searches become long
LOAD = 0.7
_FIRST_SLOTS = 1024
#: Lines of the old index that every operation moves. It moves one more for each id that it
#: inserts, and one for every `_LOOKED_FOR` ids that it looks up.
_MOVES, _LOOKED_FOR = 64, 4
#: the fraction of the limit at which clearing of the next index starts; words for each new id
_READY_FROM = 0.9
_READY_FOR_EACH = 2 * 32

_NONE = np.zeros(0, np.int64)
_PAGE = 512  #: words


class Index:
    """The slots, and while it grows, the slots of the previous, smaller index."""

    def __init__(self, hint: int = 0) -> None:
        """Start with room for `hint` ids."""
        slots = max(_FIRST_SLOTS, 1 << int(hint / LOAD).bit_length())
        self.slots: Int64s = memory.zeros(2 * slots, np.int64)
        self.old: Int64s = _NONE
        self.moved = 0  #: words of the old index that were moved
        self._next: Int64s = _NONE
        self._ready = 0

    @property
    def limit(self) -> int:
        """The maximum number of ids."""
        return int(len(self.slots) // 2 * LOAD)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self.slots.nbytes + self.old.nbytes + 8 * self._ready

    def looked_for(self, ids: int) -> None:
        """Move a part of the old index, in proportion to the number of ids looked up."""
        if len(self.old):
            self._move(_MOVES + ids // _LOOKED_FOR)

    def inserted(self, fresh: int, live: int) -> None:
        """Move a part of the old index for `fresh` new ids of `live`, to end before it grows again.

        Near the limit, clear a part of the next index.
        """
        if len(self.old):
            self._move(fresh)
        if live < self.limit * _READY_FROM:
            return
        if not len(self._next):
            self._next = memory.zeros(2 * len(self.slots), np.int64)
        until = min(self._ready + _READY_FOR_EACH * fresh, len(self._next))
        self._next[self._ready : until : _PAGE] = 0
        self._ready = until

    def grow(self) -> None:
        """Double the index; later operations move the entries of the old one."""
        self._move(len(self.old))
        if not len(self._next):
            self._next = memory.zeros(2 * len(self.slots), np.int64)
        self.slots, self.old = self._next, self.slots
        self._next, self._ready = _NONE, 0

    def _move(self, count: int) -> None:
        stop = min(self.moved + count * WORDS, len(self.old))
        migrate(self.old, self.moved, stop, self.slots)
        self.moved = stop
        if stop == len(self.old):
            self.old, self.moved = _NONE, 0
