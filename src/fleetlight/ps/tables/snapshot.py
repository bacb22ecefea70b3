# SPDX-License-Identifier: Apache-2.0
"""`Snapshot`: the rows of a table as they were at one moment, while the table goes on changing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels import RowTable
from fleetlight.ps.update import Floats, Ids

#: what stands in `_places` for a row that is as it was, and for one that has been read
_UNTOUCHED, _READ = 0, -1
_FIRST_ASIDE = 1024


class Snapshot:
    """Nothing is copied at the cut: who changes a row that was not read yet has it kept first.

    Rows that come later are not in it. The table's lock is held around every call.
    """

    def __init__(self, table: RowTable) -> None:
        order = table.in_bucket_order()
        self.ids: Ids = order.ids
        #: bucket b has the rows from starts[b] to starts[b + 1]
        self.starts = order.starts
        self._table = table
        self._numbers = order.rows
        #: by row number; above 0: where it was laid aside, counted from 1
        self._places = np.zeros(len(table.rows), np.int32)
        self._aside = np.empty((0, table.width), np.float32)
        self._used = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of memory it holds beside the table."""
        arrays = (self.ids, self.starts, self._numbers, self._places, self._aside)
        return sum(array.nbytes for array in arrays)

    def keep(self, numbers: NDArray[np.integer]) -> None:
        """Rows are about to change; numbers may repeat, and -1 is no row."""
        numbers = numbers[(numbers >= 0) & (numbers < len(self._places))]
        numbers = np.unique(numbers[self._places[numbers] == _UNTOUCHED])
        stop = self._used + len(numbers)
        if stop > len(self._aside):
            longer = np.empty((max(_FIRST_ASIDE, 2 * stop), self._table.width), np.float32)
            longer[: self._used] = self._aside[: self._used]
            self._aside = longer
        self._aside[self._used : stop] = self._table.rows[numbers]
        self._places[numbers] = np.arange(self._used + 1, stop + 1)
        self._used = stop

    def read(self, start: int, stop: int) -> Floats:
        """Rows in the order of `ids`, as they were; each is read once."""
        numbers = self._numbers[start:stop]
        places = self._places[numbers]
        rows = self._table.rows[numbers]
        moved = places > 0
        rows[moved] = self._aside[places[moved] - 1]
        self._places[numbers] = _READ
        return rows
