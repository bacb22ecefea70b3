# SPDX-License-Identifier: Apache-2.0
"""Rows that are trained here and kept elsewhere: each has by its side a copy of what is there.

Such a row is [weights | state | copy | last]: `copy` is what the keeper is believed to hold of the
weights, `last` the window of its last use, 0 in a row that has just been made.
"""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Grid, Ids, Int64s, Matrix
from fleetlight.kernels.compiling import kernel


def read(rows: Matrix, numbers: Ids, oldest: int, out: Matrix) -> Int64s:
    """Read the weights of rows by number; answers the positions that have to be fetched.

    Those are where there is no row (-1), or its last use was before the window `oldest`.
    """
    stale = np.empty(len(numbers), np.int64)
    return stale[: _read(rows, numbers, float(oldest), out, stale)]


def mark(rows: Matrix, numbers: Ids, window: int) -> Int64s:
    """Say that this window has used rows; answers the numbers of those it had not used before."""
    fresh = np.empty(len(numbers), np.int64)
    return fresh[: _mark(rows, numbers, float(window), fresh)]


def renew(rows: Matrix, numbers: Ids, arrived: Grid) -> None:
    """Take what the keeper holds now; what was learned here and not yet told stays on top of it.

    Where a row has gone meanwhile (-1) nothing happens.
    """
    _renew(rows, numbers, arrived)


def share(rows: Matrix, numbers: Ids, among: int, dim: int) -> Matrix:
    """What was learned here and not yet told, divided; taken for told from now on."""
    out = np.empty((len(numbers), dim), np.float32)
    _share(rows, numbers, float(among), out)
    return out


@kernel
def _read(rows: Matrix, numbers: Ids, oldest: float, out: Matrix, stale: Int64s) -> int:
    count = 0
    last = rows.shape[1] - 1
    for i in range(len(numbers)):
        number = numbers[i]
        if number < 0 or rows[number, last] < oldest:
            stale[count] = i
            count += 1
            continue
        for c in range(out.shape[1]):
            out[i, c] = rows[number, c]
    return count


@kernel
def _mark(rows: Matrix, numbers: Ids, window: float, fresh: Int64s) -> int:
    count = 0
    last = rows.shape[1] - 1
    for i in range(len(numbers)):
        number = numbers[i]
        if rows[number, last] != window:
            rows[number, last] = window
            fresh[count] = number
            count += 1
    return count


@kernel
def _renew(rows: Matrix, numbers: Ids, arrived: Grid) -> None:
    dim = arrived.shape[1]
    last = rows.shape[1] - 1
    copy = last - dim
    for i in range(len(numbers)):
        number = numbers[i]
        if number < 0:
            continue
        is_new = rows[number, last] == 0
        for c in range(dim):
            value = arrived[i, c]
            if is_new:
                rows[number, c] = value
            else:
                rows[number, c] += value - rows[number, copy + c]
            rows[number, copy + c] = value


@kernel
def _share(rows: Matrix, numbers: Ids, among: float, out: Matrix) -> None:
    dim = out.shape[1]
    copy = rows.shape[1] - 1 - dim
    divisor = np.float32(among)
    for i in range(len(numbers)):
        number = numbers[i]
        for c in range(dim):
            part = (rows[number, c] - rows[number, copy + c]) / divisor
            out[i, c] = part
            rows[number, copy + c] += part
