# SPDX-License-Identifier: Apache-2.0
"""One bit for each row that has changed, by row number."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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

    def of(self, rows: int) -> Uint32s:
        """A copy of the marks of so many rows."""
        return _with_words(self._marks, -(-rows // _BITS))

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


def marks_from(first: int, rows: int) -> Uint32s:
    """The marks of the rows from `first` on, of so many rows."""
    marks = np.zeros(-(-rows // _BITS), np.uint32)
    if first < rows:
        start, full = first // _BITS, 2**_BITS - 1
        marks[start:] = full
        marks[start] = full << first % _BITS & full
        marks[-1] &= full >> -rows % _BITS
    return marks


def are_marked(marks: Uint32s, numbers: Ids) -> NDArray[np.bool_]:
    """Whether each row is marked; -1 and rows without a place in `marks` are not."""
    words = numbers >> 5
    found = (words >= 0) & (words < len(marks))
    some = numbers[found]
    found[found] = marks[some >> 5] >> (some & 31).astype(np.uint32) & 1
    return found


def marks_between(marks: Uint32s, start: int, stop: int) -> NDArray[np.bool_]:
    """Whether each of some rows is marked."""
    words = marks[start // _BITS : -(-stop // _BITS)]
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
    return bits[start % _BITS :][: stop - start].view(np.bool_)


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
