# SPDX-License-Identifier: Apache-2.0
"""Gathers rows of distinct ids for the samples of a batch, and sums gradients back by id."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fleetlight.errors import ConfigError
from fleetlight.kernels.arrays import Grid, Matrix, Positions, as_grid, as_positions, room
from fleetlight.kernels.compiling.kernel import kernel


def gather(rows: ArrayLike, inverse: ArrayLike, out: Matrix | None = None) -> Matrix:
    """The row of each sample."""
    rows = np.asarray(rows)
    rows = as_grid(rows, rows.shape[-1], "rows")
    inverse = positions_below(inverse, len(rows))
    out = room(out, (len(inverse), rows.shape[1]))
    _gather(rows, inverse, out)
    return out


def sum_by(grads: ArrayLike, inverse: ArrayLike, count: int, out: Matrix | None = None) -> Matrix:
    """The sum of all samples' gradients for each of `count` distinct ids, in sample order."""
    grads = np.asarray(grads)
    inverse = positions_below(inverse, count)
    grads = as_grid(grads, grads.shape[-1], "gradients", rows=len(inverse))
    out = room(out, (count, grads.shape[1]))
    out.fill(0)
    _sum_by(grads, inverse, out)
    return out


def gather_visited(rows: Matrix, inverse: Positions) -> Matrix:
    """`gather` without checks; `inverse` must come from `dedup`."""
    out = np.empty((len(inverse), rows.shape[1]), np.float32)
    _gather(rows, inverse, out)
    return out


def sum_visited(grads: Grid, inverse: Positions, count: int) -> Matrix:
    """`sum_by` without checks; `inverse` must come from `dedup`."""
    out = np.zeros((count, grads.shape[1]), np.float32)
    _sum_by(grads, inverse, out)
    return out


def positions_below(inverse: ArrayLike, count: int) -> Positions:
    """Positions as an int32 vector, each below `count`."""
    inverse = as_positions(inverse)
    if len(inverse) and _highest(inverse) >= count:
        got = f"{inverse.min()}..{inverse.max()}"
        raise ConfigError(f"positions {got} in {count} rows, expected 0..{count - 1}")
    return inverse


@kernel
def _highest(inverse: Positions) -> int:
    """As unsigned integers, negative positions are higher than any count."""
    highest = np.uint32(0)
    for i in range(len(inverse)):
        highest = max(highest, np.uint32(inverse[i]))
    return highest


@kernel
def _gather(rows: Grid, inverse: Positions, out: Matrix) -> None:
    for i in range(len(inverse)):
        row = np.uint64(inverse[i])
        for c in range(rows.shape[1]):
            out[i, c] = rows[row, c]


@kernel
def _sum_by(grads: Grid, inverse: Positions, out: Matrix) -> None:
    for i in range(len(inverse)):
        row = np.uint64(inverse[i])
        for c in range(grads.shape[1]):
            out[row, c] += grads[i, c]
