# SPDX-License-Identifier: Apache-2.0
"""One bit for each row that has changed, by row number."""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Ids, Uint32s
from fleetlight.kernels.compiling.kernel import kernel

_WORD, _BIT, _ONE = np.uint64(5), np.uint64(31), np.uint64(1)
_BITS = 32
_FIRST_WORDS = 32


class ChangedRows:
    """The rows that have changed since the last `take`."""

    def __init__(self) -> None:
        self._marks: Uint32s = np.zeros(_FIRST_WORDS, np.uint32)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._marks.nbytes

    def __len__(self) -> int:
        """How many rows have changed."""
        return count_marks(self._marks)

    def mark(self, numbers: Ids, rows: int) -> None:
        """Mark rows by number, of so many rows; numbers may repeat, and -1 is skipped."""
        words = -(-rows // _BITS)
        if words > len(self._marks):
            self._marks = _with_words(self._marks, max(words, 2 * len(self._marks)))
        _mark(self._marks, numbers)

    def clear(self, numbers: Ids) -> None:
        """Remove the marks of rows."""
        _clear(self._marks, len(self._marks) * _BITS, numbers)

    def take(self) -> Uint32s:
        """The marks so far; none is left."""
        marks, self._marks = self._marks, np.zeros(len(self._marks), np.uint32)
        return marks

    def give_back(self, marks: Uint32s) -> None:
        """Add marks that were taken."""
        words = max(len(marks), len(self._marks))
        self._marks = _with_words(self._marks, words) | _with_words(marks, words)


def count_marks(marks: Uint32s) -> int:
    """The number of marked rows."""
    return int(np.unpackbits(marks.view(np.uint8)).sum(dtype=np.int64))


def all_but(marks: Uint32s, rows: int) -> Uint32s:
    """The marks of the others of so many rows."""
    return ~_with_words(marks, -(-rows // _BITS))


def _with_words(marks: Uint32s, words: int) -> Uint32s:
    longer = np.zeros(words, np.uint32)
    longer[: len(marks)] = marks[:words]
    return longer


@kernel
def _mark(marks: Uint32s, numbers: Ids) -> None:
    for i in range(len(numbers)):
        if numbers[i] >= 0:
            number = np.uint64(numbers[i])
            marks[number >> _WORD] |= np.uint32(_ONE << (number & _BIT))


@kernel
def _clear(marks: Uint32s, end: int, numbers: Ids) -> None:
    for i in range(len(numbers)):
        if 0 <= numbers[i] < end:
            number = np.uint64(numbers[i])
            marks[number >> _WORD] &= ~np.uint32(_ONE << (number & _BIT))
