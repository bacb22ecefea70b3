# SPDX-License-Identifier: Apache-2.0
"""Columns of files: side by side as a matrix, and the ids of texts in one buffer.

NumPy writes columns side by side three times as slowly (`np.stack(columns, 1)` is the twin). The
twin of `hash_buffer` is `data/hashing.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels.arrays import Bytes, Grid, Ids, Int64Matrix, Int64s, Layout, Matrix
from fleetlight.kernels.compiling.kernel import kernel
from fleetlight.kernels.ids.hashing import mix

#: rows that are copied at once, and stay in the cache meanwhile
_STRIP = 2_048
#: bytes of a text that are mixed at once
_WORD = 8


def side_by_side(columns: Sequence[NDArray[Any]], *, floats: bool) -> NDArray[Any]:
    """A matrix with these columns, float32 or int64; `np.stack(columns, 1)` is the twin."""
    dtype = np.float32 if floats else np.int64
    matrix = np.empty((len(columns[0]), len(columns)), dtype)
    for start in range(0, len(matrix), _STRIP):
        rows = matrix[start : start + _STRIP]
        source = np.empty(rows.shape[::-1], dtype)
        for place, column in enumerate(columns):
            source[place] = column[start : start + _STRIP]
        if floats:
            _fill_floats(source, rows)
        else:
            _fill_ints(source, rows)
    return matrix


@kernel
def _fill_floats(source: Grid, matrix: Matrix) -> None:
    for row in range(matrix.shape[0]):
        for column in range(matrix.shape[1]):
            matrix[row, column] = source[column, row]


@kernel
def _fill_ints(source: Layout, matrix: Int64Matrix) -> None:
    for row in range(matrix.shape[0]):
        for column in range(matrix.shape[1]):
            matrix[row, column] = source[column, row]


@kernel
def hash_buffer(buffer: Bytes, offsets: Ids, key: int, ids: Int64s) -> None:
    """Set the id of each text; text i has the bytes offsets[i] to offsets[i + 1]."""
    for i in range(len(ids)):
        start, stop = offsets[i], offsets[i + 1]
        state = mix(np.uint64(key) ^ np.uint64(stop - start))
        for first in range(start, stop, _WORD):
            word = np.uint64(0)
            for at in range(min(first + _WORD, stop) - 1, first - 1, -1):
                word = (word << np.uint64(8)) | np.uint64(buffer[at])
            state = mix(state ^ word)
        ids[i] = np.int64(mix(state))
