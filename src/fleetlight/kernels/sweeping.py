# SPDX-License-Identifier: Apache-2.0
"""Rows as they were at one moment, each once and in any order: who changes one takes it before.

One bit for each row says that it was taken; those of a table of millions fit a core's cache.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fleetlight.kernels.arrays import Floats, Ids, Int64s, Matrix, Uint32s
from fleetlight.kernels.compiling import kernel, part
from fleetlight.kernels.prefetching import prefetch
from fleetlight.kernels.row_access import ahead, ask, read

_WORD, _BIT = np.uint64(5), np.uint64(31)


@dataclasses.dataclass
class Batch:
    """Room for some rows, of which the first `used` are there."""

    rows: Matrix
    numbers: Int64s
    ids: Int64s
    used: int = 0

    @classmethod
    def empty(cls, size: int, width: int) -> Batch:
        """Room for `size` rows."""
        rows = np.empty((size, width), np.float32)
        return cls(rows, np.empty(size, np.int64), np.empty(size, np.int64))

    @property
    def is_full(self) -> bool:
        """Whether there is no more room."""
        return self.used == len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.rows.nbytes + self.numbers.nbytes + self.ids.nbytes


class Untaken:
    """Which of a table's first rows nobody has taken yet."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._taken: Uint32s = np.zeros(-(-rows // 32), np.uint32)

    def __len__(self) -> int:
        """How many rows it is about."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._taken.nbytes

    def take(self, rows: Matrix, numbers: Ids, ids: Ids, start: int, batch: Batch) -> int:
        """Copy the wanted rows into a batch; answers how far it came before that was full.

        Numbers may repeat, and may be of no row, or of a later one.
        """
        reached = np.array([start, batch.used])
        _take(
            self._taken,
            self._rows,
            rows.reshape(-1),
            rows.shape[1],
            numbers,
            ids,
            batch.rows.reshape(-1),
            batch.numbers,
            batch.ids,
            reached,
        )
        batch.used = int(reached[1])
        return int(reached[0])

    def take_between(self, start: int, stop: int) -> Int64s:
        """The numbers from start to stop that were there still."""
        numbers = np.empty(stop - start, np.int64)
        return numbers[: _take_between(self._taken, start, stop, numbers)]


def copy_rows(rows: Matrix, numbers: Ids, out: Matrix) -> None:
    """Whole rows, by number."""
    read(rows.reshape(-1), rows.shape[1], numbers, out)


@part
def _is_taken(taken: Uint32s, number: np.uint64) -> bool:
    return (np.uint64(taken[number >> _WORD]) >> (number & _BIT)) & np.uint64(1) != np.uint64(0)


@part
def _mark(taken: Uint32s, number: np.uint64) -> None:
    taken[number >> _WORD] |= np.uint32(np.uint64(1) << (number & _BIT))


@kernel
def _take(
    taken: Uint32s,
    top: int,
    slab: Floats,
    width: int,
    numbers: Ids,
    ids: Ids,
    copies: Floats,
    its_numbers: Int64s,
    its_ids: Int64s,
    reached: Int64s,
) -> None:
    early = ahead(width)
    i, used = reached[0], reached[1]
    while i < len(numbers) and used < len(its_ids):
        if i + 2 * early < len(numbers):
            soon = numbers[np.uint64(i + 2 * early)]
            if 0 <= soon < top:
                prefetch(taken, np.uint64(soon) >> _WORD)
        if i + early < len(numbers):
            later = numbers[np.uint64(i + early)]
            if 0 <= later < top and not _is_taken(taken, np.uint64(later)):
                ask(slab, np.uint64(later) * np.uint64(width), width)
        number = numbers[np.uint64(i)]
        if 0 <= number < top and not _is_taken(taken, np.uint64(number)):
            _mark(taken, np.uint64(number))
            at, to = np.uint64(number) * np.uint64(width), np.uint64(used) * np.uint64(width)
            for c in range(width):
                copies[to + np.uint64(c)] = slab[at + np.uint64(c)]
            its_numbers[np.uint64(used)] = number
            its_ids[np.uint64(used)] = ids[np.uint64(i)]
            used += 1
        i += 1
    reached[0], reached[1] = i, used


@kernel
def _take_between(taken: Uint32s, start: int, stop: int, numbers: Int64s) -> int:
    count = 0
    for number in range(start, stop):
        if not _is_taken(taken, np.uint64(number)):
            _mark(taken, np.uint64(number))
            numbers[np.uint64(count)] = number
            count += 1
    return count
