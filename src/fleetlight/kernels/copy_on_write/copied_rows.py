# SPDX-License-Identifier: Apache-2.0
"""Copy-on-write: a writer copies rows before it changes them, and a reader reads the copies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels.arrays import Floats, Ids, Int32s, Int64s, Matrix
from fleetlight.kernels.compiling.kernel import kernel
from fleetlight.kernels.compiling.prefetching import prefetch
from fleetlight.kernels.rows.row_access import ahead, ask


def lay_aside(
    places: Int32s,
    rows: Matrix,
    aside: Matrix,
    used: int,
    numbers: Ids,
    at: Ids | None = None,
) -> Int64s:
    """Copy rows without a place after the `used` copies; return their positions in `numbers`.

    Places count from 1. Numbers may repeat, be -1, or belong to rows added after the cut. `at` has
    the position of each row in `rows`; None: its number.
    """
    fresh = np.empty(len(numbers), np.int64)
    width, at = rows.shape[1], numbers if at is None else at
    flat, copies = rows.reshape(-1), aside.reshape(-1)
    return fresh[: _lay_aside(places, flat, copies, width, used, numbers, at, fresh)]


def read_as_they_were(
    places: Int32s,
    rows: Matrix,
    aside: Matrix,
    numbers: NDArray[np.integer],
    done: int,
    at: Ids | None = None,
) -> Matrix:
    """Read each row once, from its copy if there is one, and set its place to `done`.

    `at`: see `lay_aside`.
    """
    wanted, width = numbers.astype(np.int64, copy=False), rows.shape[1]
    out = np.empty((len(wanted), width), np.float32)
    flat, copies, at = rows.reshape(-1), aside.reshape(-1), wanted if at is None else at
    _read(places, flat, copies, width, wanted, at, done, out.reshape(-1))
    return out


@kernel
def _read(
    places: Int32s,
    slab: Floats,
    aside: Floats,
    width: int,
    numbers: Ids,
    at: Ids,
    done: int,
    out: Floats,
) -> None:
    early = ahead(width)
    for i in range(len(numbers)):
        if i + early < len(numbers):
            prefetch(places, np.uint64(numbers[i + early]))
            ask(slab, np.uint64(at[i + early]) * np.uint64(width), width)
        number = np.uint64(numbers[i])
        place = places[number]
        to = np.uint64(i) * np.uint64(width)
        if place > 0:
            start = np.uint64(place - 1) * np.uint64(width)
            for c in range(width):
                out[to + np.uint64(c)] = aside[start + np.uint64(c)]
        else:
            start = np.uint64(at[i]) * np.uint64(width)
            for c in range(width):
                out[to + np.uint64(c)] = slab[start + np.uint64(c)]
        places[number] = done


@kernel
def _lay_aside(
    places: Int32s,
    slab: Floats,
    aside: Floats,
    width: int,
    used: int,
    numbers: Ids,
    at: Ids,
    fresh: Int64s,
) -> int:
    count = 0
    early = ahead(width)
    for i in range(len(numbers)):
        if i + early < len(numbers):
            prefetch(places, np.uint64(max(numbers[i + early], 0)))
            ask(slab, np.uint64(max(at[i + early], 0)) * np.uint64(width), width)
        number = numbers[i]
        if number < 0 or number >= len(places) or places[np.uint64(number)] != 0:
            continue
        to = np.uint64(used + count) * np.uint64(width)
        start = np.uint64(at[i]) * np.uint64(width)
        for c in range(width):
            aside[to + np.uint64(c)] = slab[start + np.uint64(c)]
        fresh[count] = i
        count += 1
        places[np.uint64(number)] = used + count
    return count
