# SPDX-License-Identifier: Apache-2.0
"""Rows that a worker trains locally, each with a copy of the server's weights.

A row is [weights | state | copy | last]. `copy` is the last known value on the server; `last` is
the window of the last use, 0 in a new row.
"""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Floats, Grid, Ids, Int64s, Matrix
from fleetlight.kernels.compiling.kernel import kernel
from fleetlight.kernels.rows.row_access import ahead, ask

#: windows are counted from 1
_NO_WINDOW = 0


def read(rows: Matrix, numbers: Ids, oldest: int, out: Matrix) -> Int64s:
    """Read the weights of rows by number; return the positions that must be fetched.

    These positions have no row (-1), or a row last used before the window `oldest`.
    """
    return _read_and_mark(rows, numbers, oldest, _NO_WINDOW, out)[0]


def visit(rows: Matrix, numbers: Ids, oldest: int, window: int, out: Matrix) -> tuple[Int64s, Ids]:
    """`read` and `mark` in one pass; rows that must be fetched are not marked."""
    return _read_and_mark(rows, numbers, oldest, window, out)


def mark(rows: Matrix, numbers: Ids, window: int) -> Int64s:
    """Mark rows as used in this window; return the numbers of newly marked rows."""
    fresh = np.empty(len(numbers), np.int64)
    return fresh[: _mark(rows.reshape(-1), rows.shape[1], numbers, float(window), fresh)]


def renew(rows: Matrix, numbers: Ids, arrived: Grid) -> None:
    """Take the values of the server, and keep unsent local progress; -1 is skipped."""
    _renew(rows.reshape(-1), rows.shape[1], numbers, arrived)


def share(rows: Matrix, numbers: Ids, among: int, dim: int) -> Matrix:
    """Return unsent local progress, divided by `among`, and count it as sent."""
    out = np.empty((len(numbers), dim), np.float32)
    _share(rows.reshape(-1), rows.shape[1], numbers, float(among), out)
    return out


def _read_and_mark(
    rows: Matrix, numbers: Ids, oldest: int, window: int, out: Matrix
) -> tuple[Int64s, Ids]:
    stale, fresh = np.empty(len(numbers), np.int64), np.empty(1 + len(numbers), np.int64)
    flat, width = rows.reshape(-1), rows.shape[1]
    count = _visit(flat, width, numbers, float(oldest), float(window), out, stale, fresh)
    return stale[:count], fresh[1 : 1 + fresh[0]]


@kernel
def _visit(
    slab: Floats,
    width: int,
    numbers: Ids,
    oldest: float,
    window: float,
    out: Matrix,
    stale: Int64s,
    fresh: Int64s,
) -> int:
    count = 0
    fresh[0] = 0
    dim = out.shape[1]
    early = ahead(width)
    for i in range(len(numbers)):
        if i + early < len(numbers):
            at = np.uint64(max(numbers[i + early], 0)) * np.uint64(width)
            ask(slab, at, dim)
            ask(slab, at + np.uint64(width - 1), 1)
        at = np.uint64(max(numbers[i], 0)) * np.uint64(width)
        last = at + np.uint64(width - 1)
        if numbers[i] < 0 or slab[last] < oldest:
            stale[count] = i
            count += 1
            continue
        for c in range(dim):
            out[i, c] = slab[at + np.uint64(c)]
        if window > 0 and slab[last] != window:
            slab[last] = window
            fresh[0] += 1
            fresh[fresh[0]] = numbers[i]
    return count


@kernel
def _mark(slab: Floats, width: int, numbers: Ids, window: float, fresh: Int64s) -> int:
    count = 0
    for i in range(len(numbers)):
        last = np.uint64(numbers[i]) * np.uint64(width) + np.uint64(width - 1)
        if slab[last] != window:
            slab[last] = window
            fresh[count] = numbers[i]
            count += 1
    return count


@kernel
def _renew(slab: Floats, width: int, numbers: Ids, arrived: Grid) -> None:
    dim = arrived.shape[1]
    early = ahead(width)
    for i in range(len(numbers)):
        if i + early < len(numbers):
            ask(slab, np.uint64(max(numbers[i + early], 0)) * np.uint64(width), width)
        if numbers[i] < 0:
            continue
        at = np.uint64(numbers[i]) * np.uint64(width)
        copy = at + np.uint64(width - 1 - dim)
        is_new = slab[at + np.uint64(width - 1)] == 0
        for c in range(dim):
            value = arrived[i, c]
            if is_new:
                slab[at + np.uint64(c)] = value
            else:
                slab[at + np.uint64(c)] += value - slab[copy + np.uint64(c)]
            slab[copy + np.uint64(c)] = value


@kernel
def _share(slab: Floats, width: int, numbers: Ids, among: float, out: Matrix) -> None:
    dim = out.shape[1]
    divisor = np.float32(among)
    early = ahead(width)
    for i in range(len(numbers)):
        if i + early < len(numbers):
            ask(slab, np.uint64(numbers[i + early]) * np.uint64(width), width)
        at = np.uint64(numbers[i]) * np.uint64(width)
        copy = at + np.uint64(width - 1 - dim)
        for c in range(dim):
            part = (slab[at + np.uint64(c)] - slab[copy + np.uint64(c)]) / divisor
            out[i, c] = part
            slab[copy + np.uint64(c)] += part
