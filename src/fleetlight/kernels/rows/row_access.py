# SPDX-License-Identifier: Apache-2.0
"""Access to the rows of a slab by number: initialise, read the weights, write whole rows."""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Floats, Grid, Ids, Matrix
from fleetlight.kernels.compiling.kernel import kernel, part
from fleetlight.kernels.compiling.prefetching import prefetch
from fleetlight.kernels.rows.first_values import stream_of, value_at

_LINE = 16  #: floats in a cache line
_ASKED = 2048  #: floats prefetched at a time, a sixth of the L1 cache


@part
def ahead(floats: int) -> int:
    """The distance, in rows, at which rows of this many floats are prefetched."""
    return max(4, min(128, _ASKED // floats))


@part
def ask(slab: Floats, at: np.uint64, floats: int) -> None:
    """Prefetch a row."""
    for line in range(0, floats, _LINE):
        prefetch(slab, at + np.uint64(line))
    prefetch(slab, at + np.uint64(floats - 1))


@kernel
def begin(
    slab: Floats,
    width: int,
    numbers: Ids,
    ids: Ids,
    fresh: Ids,
    dim: int,
    seed: int,
    normal: bool,
    offset: float,
    step: float,
    state: int,
    initial: float,
) -> None:
    """Initialise new rows: first values, `state` floats of initial state, zeros as metadata."""
    for k in range(len(fresh)):
        i = np.uint64(fresh[k])
        at = np.uint64(numbers[i]) * np.uint64(width)
        stream = stream_of(ids[i], seed)
        for c in range(dim):
            slab[at + np.uint64(c)] = value_at(stream, c, normal, offset, step)
        for c in range(dim, dim + state):
            slab[at + np.uint64(c)] = initial
        for c in range(dim + state, width):
            slab[at + np.uint64(c)] = 0


@kernel
def read(slab: Floats, width: int, numbers: Ids, out: Matrix) -> None:
    """Read the weights of each row; -1 reads row 0."""
    dim = out.shape[1]
    early = ahead(dim)
    for i in range(len(numbers)):
        if i + early < len(numbers):
            ask(slab, np.uint64(max(numbers[i + early], 0)) * np.uint64(width), dim)
        at = np.uint64(max(numbers[i], 0)) * np.uint64(width)
        for c in range(dim):
            out[i, c] = slab[at + np.uint64(c)]


def copy_rows(rows: Matrix, numbers: Ids, out: Matrix) -> None:
    """Copy whole rows, by number, to `out`."""
    read(rows.reshape(-1), rows.shape[1], numbers, out)


@kernel
def read_unknown(
    numbers: Ids, ids: Ids, seed: int, normal: bool, offset: float, step: float, out: Matrix
) -> None:
    """Read the first values of ids without a row (-1)."""
    for i in range(len(numbers)):
        if numbers[i] < 0:
            stream = stream_of(ids[i], seed)
            for c in range(out.shape[1]):
                out[i, c] = value_at(stream, c, normal, offset, step)


@kernel
def write(slab: Floats, width: int, numbers: Ids, values: Grid) -> None:
    """Replace whole rows; of a repeated row, the last value wins."""
    for i in range(len(numbers)):
        at = np.uint64(numbers[i]) * np.uint64(width)
        for c in range(width):
            slab[at + np.uint64(c)] = values[i, c]
