# SPDX-License-Identifier: Apache-2.0
"""Rows of a slab by number: begin new ones, read their weights, write them whole."""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Floats, Grid, Ids, Matrix
from fleetlight.kernels.compiling import kernel
from fleetlight.kernels.first_values import stream_of, value_at
from fleetlight.kernels.prefetching import prefetch

_AHEAD = 32
_LINE = 16  #: floats in a cache line


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
    """Give new rows their first values, `state` floats of initial state, and zeros as meta data."""
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
    """The weights of each row; where there is none (-1), those of row 0."""
    dim = out.shape[1]
    for i in range(len(numbers)):
        if i + _AHEAD < len(numbers):
            soon = np.uint64(max(numbers[i + _AHEAD], 0)) * np.uint64(width)
            for line in range(0, dim, _LINE):
                prefetch(slab, soon + np.uint64(line))
        at = np.uint64(max(numbers[i], 0)) * np.uint64(width)
        for c in range(dim):
            out[i, c] = slab[at + np.uint64(c)]


@kernel
def read_unknown(
    numbers: Ids, ids: Ids, seed: int, normal: bool, offset: float, step: float, out: Matrix
) -> None:
    """The first values of the ids that have no row (-1)."""
    for i in range(len(numbers)):
        if numbers[i] < 0:
            stream = stream_of(ids[i], seed)
            for c in range(out.shape[1]):
                out[i, c] = value_at(stream, c, normal, offset, step)


@kernel
def write(slab: Floats, width: int, numbers: Ids, values: Grid) -> None:
    """Replace whole rows; of a row that comes twice the last value stays."""
    for i in range(len(numbers)):
        at = np.uint64(numbers[i]) * np.uint64(width)
        for c in range(width):
            slab[at + np.uint64(c)] = values[i, c]
