# SPDX-License-Identifier: Apache-2.0
"""`Slots`: memory for some rows of a tiered table, and a place for each row in memory or file."""

from __future__ import annotations

import numpy as np

from fleetlight.errors import ConfigError
from fleetlight.kernels.arrays import Int32s, Int64s, Matrix
from fleetlight.kernels.rows import memory
from fleetlight.kernels.rows.slab import MAX_ROWS, TOP, Slab
from fleetlight.kernels.rows.tier.residency import FREE

#: each row needs so many bytes of index, so a machine cannot have more rows
_INDEX_BYTES = 32
_FIRST_ROWS = 1024


class Slots(Slab):
    """A slab whose `rows` are slots; row numbers only count what the table knows of each row."""

    where: Int32s
    meta: Matrix

    def __init__(self, width: int, slots: int, meta_width: int) -> None:
        self.width = width
        self.counters: Int64s = np.zeros(4, np.int64)
        self.freed: Int32s = np.zeros(0, np.int32)
        #: the floats of all slots; a page uses memory from its first row on
        self.flat = memory.zeros(slots * width, np.float32)
        self.owners: Int32s = np.full(slots, FREE, np.int32)
        self.uses = np.zeros(slots, np.int8)
        #: by slot: position + 1 of an equal row in the file, 0 if there is none
        self.copies: Int32s = np.zeros(slots, np.int32)
        self._unused: Int32s = np.arange(slots - 1, -1, -1, dtype=np.int32)
        #: how many slots are free
        self.unused = slots
        self.capacity = min(MAX_ROWS, memory.worth_reserving() // _INDEX_BYTES)
        homes = memory.reserve(self.capacity, np.uint32)
        where = memory.reserve(self.capacity, np.int32)
        meta = memory.reserve(max(1, self.capacity * meta_width), np.float32)
        if homes is None or where is None or meta is None:
            self.capacity = _FIRST_ROWS
            homes, where = np.zeros(_FIRST_ROWS, np.uint32), np.zeros(_FIRST_ROWS, np.int32)
            meta = np.zeros(_FIRST_ROWS * meta_width, np.float32)
        self.homes, self.where = homes, where
        self.meta = meta[: self.capacity * meta_width].reshape(self.capacity, meta_width)

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def rows(self) -> Matrix:
        """All slots."""
        return self.flat.reshape(len(self.owners), self.width)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        used = len(self.owners) - self.unused
        for_rows = int(self.counters[TOP]) * (8 + 4 * self.meta.shape[1])
        for_slots = self.owners.nbytes + self.uses.nbytes + self.copies.nbytes + self._unused.nbytes
        return used * 4 * self.width + for_rows + for_slots + self.freed.nbytes

    def grow(self) -> None:
        """Make room for 1.5 times as many row numbers; the slots stay."""
        capacity = min(MAX_ROWS, self.capacity * 3 // 2)
        if capacity == self.capacity:
            raise ConfigError(f"a table of {MAX_ROWS} rows is full: use more servers")
        homes, where = memory.zeros(capacity, np.uint32), memory.zeros(capacity, np.int32)
        meta = memory.zeros(capacity * self.meta.shape[1], np.float32)
        meta = meta.reshape(capacity, self.meta.shape[1])
        for new, old in ((homes, self.homes), (where, self.where), (meta, self.meta)):
            new[: self.capacity] = old[: self.capacity]
        self.homes, self.where, self.meta, self.capacity = homes, where, meta, capacity

    def take(self, count: int) -> Int64s:
        """Free slots, which the caller gives to rows."""
        self.unused -= count
        taken: Int64s = self._unused[self.unused : self.unused + count].astype(np.int64)
        return taken

    def give_back(self, slots: Int64s) -> None:
        """Free slots whose rows have left memory."""
        self.owners[slots], self.uses[slots], self.copies[slots] = FREE, 0, 0
        self._unused[self.unused : self.unused + len(slots)] = slots
        self.unused += len(slots)
