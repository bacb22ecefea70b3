# SPDX-License-Identifier: Apache-2.0
"""Copy-on-write in any order: a writer takes a row before it changes it, a reader takes the rest.

One bit for each row marks it as taken; the bits of millions of rows fit a core's cache.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fleetlight.kernels.arrays import Floats, Ids, Int64s, Matrix, Uint32s
from fleetlight.kernels.compiling.kernel import kernel, part
from fleetlight.kernels.copy_on_write.changed_rows import all_but, count_marks
from fleetlight.kernels.rows.row_access import ahead, ask

_WORD, _BIT = np.uint64(5), np.uint64(31)
_NONE, _ONE = np.uint64(0), np.uint64(1)


@dataclasses.dataclass
class Batch:
    """A buffer of rows, of which the first `used` are filled."""

    rows: Matrix
    numbers: Int64s
    ids: Int64s
    used: int = 0

    @classmethod
    def empty(cls, size: int, width: int) -> Batch:
        """An empty buffer for `size` rows."""
        rows = np.empty((size, width), np.float32)
        return cls(rows, np.empty(size, np.int64), np.empty(size, np.int64))

    @property
    def is_full(self) -> bool:
        """Whether all rows are filled."""
        return self.used == len(self.ids)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.rows.nbytes + self.numbers.nbytes + self.ids.nbytes


class PendingRows:
    """The rows of a snapshot that no reader or writer has taken yet."""

    def __init__(self, rows: int, marks: Uint32s | None = None) -> None:
        """All rows, or the marked ones of so many rows."""
        self._rows = rows
        #: how many are left
        self.left = rows if marks is None else count_marks(marks)
        words = -(-rows // 32)
        self._taken: Uint32s = np.zeros(words, np.uint32) if marks is None else all_but(marks, rows)

    def __len__(self) -> int:
        """The number of rows of the snapshot."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._taken.nbytes

    def take(
        self,
        rows: Matrix,
        numbers: Ids,
        ids: Ids,
        start: int,
        batch: Batch,
        at: Ids | None = None,
    ) -> int:
        """Copy pending rows into a batch until it is full; return the position reached.

        Numbers may repeat, be -1, or belong to rows added after the cut. `at` has the position of
        each row in `rows`; None: its number.
        """
        reached = np.array([start, batch.used])
        _take(
            self._taken,
            self._rows,
            rows.reshape(-1),
            rows.shape[1],
            numbers,
            numbers if at is None else at,
            ids,
            batch.rows.reshape(-1),
            batch.numbers,
            batch.ids,
            np.empty(len(numbers), np.int64),
            reached,
        )
        self.left -= int(reached[1]) - batch.used
        batch.used = int(reached[1])
        return int(reached[0])

    def take_between(self, start: int, stop: int) -> Int64s:
        """Take the pending rows from start to stop."""
        numbers = np.empty(stop - start, np.int64)
        count = _take_between(self._taken, start, stop, numbers)
        self.left -= count
        return numbers[:count]

    def take_listed(self, listed: Ids) -> Int64s:
        """Take those of the listed rows that are pending."""
        numbers = np.empty(len(listed), np.int64)
        count = _take_listed(self._taken, listed, numbers)
        self.left -= count
        return numbers[:count]


@part
def _is_taken(taken: Uint32s, number: np.uint64) -> bool:
    return np.uint64(taken[number >> _WORD]) >> (number & _BIT) & _ONE != _NONE


@part
def _mark(taken: Uint32s, number: np.uint64) -> None:
    taken[number >> _WORD] |= np.uint32(_ONE << (number & _BIT))


@part
def _find_fresh(taken: Uint32s, top: int, numbers: Ids, start: int, fresh: Int64s) -> int:
    """Positions of rows that are pending; repeated numbers appear repeatedly."""
    count = 0
    for i in range(start, len(numbers)):
        # -1 becomes a large number
        number = np.uint64(numbers[i])
        known = number < np.uint64(top)
        number = number if known else _NONE
        # always written, counted only if pending: no branch
        fresh[np.uint64(count)] = i
        count += np.int64(known and not _is_taken(taken, number))
    return count


@kernel
def _take(
    taken: Uint32s,
    top: int,
    slab: Floats,
    width: int,
    numbers: Ids,
    at: Ids,
    ids: Ids,
    copies: Floats,
    its_numbers: Int64s,
    its_ids: Int64s,
    fresh: Int64s,
    reached: Int64s,
) -> None:
    count = _find_fresh(taken, top, numbers, reached[0], fresh)
    early = ahead(width)
    used, end = reached[1], len(numbers)
    for k in range(count):
        i = np.uint64(fresh[k])
        if k + early < count:
            soon = at[np.uint64(fresh[k + early])]
            ask(slab, np.uint64(soon) * np.uint64(width), width)
        number = np.uint64(numbers[i])
        if _is_taken(taken, number):  # a repeated number
            continue
        if used == len(its_ids):
            end = np.int64(i)
            break
        _mark(taken, number)
        begin, to = np.uint64(at[i]) * np.uint64(width), np.uint64(used) * np.uint64(width)
        for c in range(width):
            copies[to + np.uint64(c)] = slab[begin + np.uint64(c)]
        its_numbers[np.uint64(used)] = numbers[i]
        its_ids[np.uint64(used)] = ids[i]
        used += 1
    reached[0], reached[1] = end, used


@kernel
def _take_between(taken: Uint32s, start: int, stop: int, numbers: Int64s) -> int:
    count = 0
    for number in range(start, stop):
        at = np.uint64(number)
        if not _is_taken(taken, at):
            _mark(taken, at)
            numbers[np.uint64(count)] = number
            count += 1
    return count


@kernel
def _take_listed(taken: Uint32s, listed: Ids, numbers: Int64s) -> int:
    count = 0
    for i in range(len(listed)):
        at = np.uint64(listed[i])
        if not _is_taken(taken, at):
            _mark(taken, at)
            numbers[np.uint64(count)] = listed[i]
            count += 1
    return count
