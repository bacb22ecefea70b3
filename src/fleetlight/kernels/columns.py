# SPDX-License-Identifier: Apache-2.0
"""Columns of files: side by side as a matrix, and the ids of texts in one buffer.

`np.stack(columns, 1)` is the twin of `SideBySide`, several times as slow. The twin of
`hash_buffer` is `data/hashing.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels.arrays import Bytes, Ids, Int64Matrix, Int64s, Matrix, Values
from fleetlight.kernels.compiling.kernel import kernel, part
from fleetlight.kernels.ids.hashing import mix

#: rows that are written at once: the matrix of them is in the cache, and each column is read in one
#: go, four of them at a time, since columns often lie at addresses that share few lines of a cache
_STRIP = 1024
#: bytes of a text that are mixed at once
_WORD = 8


class SideBySide:
    """Columns of which some rows become a matrix, float32 or int64, without a copy between."""

    def __init__(self, columns: Sequence[NDArray[Any]], *, floats: bool) -> None:
        dtype = np.dtype(np.float32 if floats else np.int64)
        # the kernel reads them by their addresses
        self._columns = [np.require(column, dtype, ["C", "A"]) for column in columns]
        self._floats, self._rows = floats, len(columns[0])
        addresses = [column.__array_interface__["data"][0] for column in self._columns]
        first = min(addresses)
        self._offsets = (np.array(addresses, np.int64) - first) // dtype.itemsize
        # one array over all columns, of which only their elements are read
        self._all = np.lib.stride_tricks.as_strided(
            self._columns[addresses.index(first)],
            (int(self._offsets.max()) + self._rows,),
            (dtype.itemsize,),
            writeable=False,
        )

    def rows(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """The matrix of these rows, by default of all."""
        stop = self._rows if stop is None else min(stop, self._rows)
        shape = max(0, stop - start), len(self._columns)
        if self._floats:
            floats = np.empty(shape, np.float32)
            _fill_floats(self._all, self._offsets + start, floats)
            return floats
        ints = np.empty(shape, np.int64)
        _fill_ints(self._all, self._offsets + start, ints)
        return ints


@part
def _fill(columns: NDArray[Any], offsets: Ids, matrix: NDArray[Any]) -> None:
    rows, width = matrix.shape
    for first in range(0, rows, _STRIP):
        stop = min(first + _STRIP, rows)
        for column in range(0, width - 3, 4):
            a, b = offsets[column], offsets[column + 1]
            c, d = offsets[column + 2], offsets[column + 3]
            for row in range(first, stop):
                matrix[row, column] = columns[a + row]
                matrix[row, column + 1] = columns[b + row]
                matrix[row, column + 2] = columns[c + row]
                matrix[row, column + 3] = columns[d + row]
        for column in range(width - width % 4, width):
            offset = offsets[column]
            for row in range(first, stop):
                matrix[row, column] = columns[offset + row]


@kernel
def _fill_floats(columns: Values, offsets: Ids, matrix: Matrix) -> None:
    _fill(columns, offsets, matrix)


@kernel
def _fill_ints(columns: Ids, offsets: Ids, matrix: Int64Matrix) -> None:
    _fill(columns, offsets, matrix)


@kernel
def follow_each_other(records: Ids) -> bool:
    """True for records each of which is the one after the last; `(np.diff(records) == 1).all()`."""
    found = 1
    for i in range(1, len(records)):
        found += records[i] == records[i - 1] + 1
    return found >= len(records)


@kernel
def hash_buffer(buffer: Bytes, offsets: Ids, key: int, ids: Int64s) -> int:
    """Set the id of each text; text i has the bytes offsets[i] to offsets[i + 1].

    Returns the first text that is not inside the buffer, or -1.
    """
    for i in range(len(ids)):
        start, stop = offsets[i], offsets[i + 1]
        if not 0 <= start <= stop <= len(buffer):
            return i
        state = mix(np.uint64(key) ^ np.uint64(stop - start))
        for first in range(start, stop, _WORD):
            word = np.uint64(0)
            for at in range(min(first + _WORD, stop) - 1, first - 1, -1):
                word = (word << np.uint64(8)) | np.uint64(buffer[at])
            state = mix(state ^ word)
        ids[i] = np.int64(mix(state))
    return -1
