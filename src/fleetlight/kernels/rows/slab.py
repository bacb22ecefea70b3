# SPDX-License-Identifier: Apache-2.0
"""The rows of a table, by number: weights, state and metadata of a row are adjacent.

Rows do not move: the slab reserves address space for all rows that the machine could ever hold, and
a page uses memory from its first row on. If the system refuses the reservation, for example by a
limit on address space, a full slab is copied to a larger array.
"""

from __future__ import annotations

import numpy as np

from fleetlight.errors import ConfigError
from fleetlight.kernels.arrays import Floats, Int32s, Int64s, Matrix, Uint32s
from fleetlight.kernels.rows import memory

#: places in `counters`: rows in use, rows ever used, freed rows, rows new in the last call
LIVE, TOP, FREED, FRESH = range(4)
#: row numbers fit int32
MAX_ROWS = 2**31 - 1
_FIRST_ROWS = 1024


class Slab:
    """Rows of `width` floats, and for each row the low bits of its id's hash."""

    flat: Floats
    homes: Uint32s

    def __init__(self, width: int) -> None:
        self.width = width
        self.counters: Int64s = np.zeros(4, np.int64)
        self.freed: Int32s = np.zeros(0, np.int32)
        self.capacity = min(MAX_ROWS, memory.worth_reserving() // (4 * width))
        flat = memory.reserve(self.capacity * width, np.float32)
        homes = memory.reserve(self.capacity, np.uint32)
        if flat is None or homes is None:
            self.capacity = _FIRST_ROWS
            flat, homes = (
                np.zeros(_FIRST_ROWS * width, np.float32),
                np.zeros(_FIRST_ROWS, np.uint32),
            )
        self.flat, self.homes = flat, homes

    @property
    def rows(self) -> Matrix:
        """All rows ever used; the view is valid until the table grows."""
        top = int(self.counters[TOP])
        return self.flat[: top * self.width].reshape(top, self.width)

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return int(self.counters[TOP]) * (4 * self.width + 4) + self.freed.nbytes

    def grow(self) -> None:
        """Copy all rows to an array that is 1.5 times as large."""
        capacity = min(MAX_ROWS, self.capacity * 3 // 2)
        if capacity == self.capacity:
            raise ConfigError(f"a table of {MAX_ROWS} rows is full: use more servers")
        flat = memory.zeros(capacity * self.width, np.float32)
        homes = memory.zeros(capacity, np.uint32)
        flat[: len(self.flat)], homes[: len(self.homes)] = self.flat, self.homes
        self.flat, self.homes, self.capacity = flat, homes, capacity

    def make_room_to_free(self, count: int) -> None:
        """Make room for `count` more entries in the list of freed rows."""
        used = int(self.counters[FREED])
        if used + count > len(self.freed):
            longer = np.zeros(max(used + count, 2 * len(self.freed)), np.int32)
            longer[:used] = self.freed[:used]
            self.freed = longer
