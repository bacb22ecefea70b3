# SPDX-License-Identifier: Apache-2.0
"""Copy-on-write: a writer copies rows before it changes them, and a reader reads the copies."""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Floats, Ids, Int32s, Int64s, Matrix
from fleetlight.kernels.compiling.kernel import kernel
from fleetlight.kernels.compiling.prefetching import prefetch
from fleetlight.kernels.rows.row_access import ahead, ask


def lay_aside(places: Int32s, rows: Matrix, aside: Matrix, used: int, numbers: Ids) -> Int64s:
    """Copy rows without a place after the `used` copies; return their positions in `numbers`.

    Places count from 1. Numbers may repeat, be -1, or belong to rows added after the cut.
    """
    fresh = np.empty(len(numbers), np.int64)
    width = rows.shape[1]
    count = _lay_aside(places, rows.reshape(-1), aside.reshape(-1), width, used, numbers, fresh)
    return fresh[:count]


def read_as_they_were(
    places: Int32s, rows: Matrix, aside: Matrix, numbers: Int32s, done: int
) -> Matrix:
    """Read each row once, from its copy if there is one, and set its place to `done`."""
    width = rows.shape[1]
    out = np.empty((len(numbers), width), np.float32)
    _read(places, rows.reshape(-1), aside.reshape(-1), width, numbers, done, out.reshape(-1))
    return out


@kernel
def _read(
    places: Int32s,
    slab: Floats,
    aside: Floats,
    width: int,
    numbers: Int32s,
    done: int,
    out: Floats,
) -> None:
    early = ahead(width)
    for i in range(len(numbers)):
        if i + early < len(numbers):
            later = np.uint64(numbers[i + early])
            prefetch(places, later)
            ask(slab, later * np.uint64(width), width)
        number = np.uint64(numbers[i])
        place = places[number]
        to = np.uint64(i) * np.uint64(width)
        if place > 0:
            at = np.uint64(place - 1) * np.uint64(width)
            for c in range(width):
                out[to + np.uint64(c)] = aside[at + np.uint64(c)]
        else:
            at = number * np.uint64(width)
            for c in range(width):
                out[to + np.uint64(c)] = slab[at + np.uint64(c)]
        places[number] = done


@kernel
def _lay_aside(
    places: Int32s,
    slab: Floats,
    aside: Floats,
    width: int,
    used: int,
    numbers: Ids,
    fresh: Int64s,
) -> int:
    count = 0
    early = ahead(width)
    for i in range(len(numbers)):
        if i + early < len(numbers):
            later = np.uint64(max(numbers[i + early], 0))
            prefetch(places, later)
            ask(slab, later * np.uint64(width), width)
        number = numbers[i]
        if number < 0 or number >= len(places) or places[np.uint64(number)] != 0:
            continue
        to = np.uint64(used + count) * np.uint64(width)
        at = np.uint64(number) * np.uint64(width)
        for c in range(width):
            aside[to + np.uint64(c)] = slab[at + np.uint64(c)]
        fresh[count] = i
        count += 1
        places[np.uint64(number)] = used + count
    return count
