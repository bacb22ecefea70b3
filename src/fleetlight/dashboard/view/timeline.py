# SPDX-License-Identifier: Apache-2.0
"""`Timeline`: metrics of all processes on one axis of time, with a maximum of moments. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable

#: moments of the axis; when it has more, two and two become one
MAX_BINS = 400
_NONE = math.nan


class Timeline:
    """Sums and newest values in bins of equal width.

    A line is `total / count` of two sums, or the newest value in each bin.
    """

    def __init__(self, most: int = MAX_BINS) -> None:
        self._most = most
        #: when the first bin starts; None before the first value
        self.start: float | None = None
        self.width = 1.0
        self.bins = 0
        #: changes when all bins change
        self.generation = 0
        self._totals: dict[str, array[float]] = {}
        self._counts: dict[str, array[float]] = {}
        self._newest: dict[str, array[float]] = {}

    def spread(self, key: str, since: float, at: float, total: float, count: float) -> None:
        """Add to the quotient of a line, evenly over the bins of an interval."""
        last = self._bin(at)
        if last is None or self.start is None:
            return
        first = max(0, min(last, int((since - self.start) // self.width)))
        totals = _column(self._totals, key, self.bins, 0.0)
        counts = _column(self._counts, key, self.bins, 0.0)
        for place in range(first, last + 1):
            begin = self.start + place * self.width
            inside = min(at, begin + self.width) - max(since, begin)
            share = inside / (at - since) if first < last else 1.0
            totals[place] += total * share
            counts[place] += count * share

    def put(self, key: str, at: float, value: float) -> None:
        """Set the value of a line at a moment."""
        place = self._bin(at)
        if place is not None:
            _column(self._newest, key, self.bins, _NONE)[place] = value

    def line(self, key: str, first: int = 0) -> list[float]:
        """The values of a line from a bin on; NaN where it has none."""
        if key in self._newest:
            return list(_column(self._newest, key, self.bins, _NONE)[first:])
        if key not in self._totals:
            return [_NONE] * (self.bins - first)
        totals = _column(self._totals, key, self.bins, 0.0)[first:]
        counts = _column(self._counts, key, self.bins, 0.0)[first:]
        return [t / c if c else _NONE for t, c in zip(totals, counts, strict=True)]

    def times(self, first: int = 0) -> list[float]:
        """The moments in the middle of the bins."""
        start = self.start or 0.0
        return [start + (place + 0.5) * self.width for place in range(first, self.bins)]

    def _bin(self, at: float) -> int | None:
        """The bin of a moment, made if necessary; None if it is before the first."""
        if self.start is None:
            self.start = math.floor(at)
        place = int((at - self.start) // self.width)
        if place < 0:
            return None
        while place >= self._most:
            self._halve()
            place = int((at - self.start) // self.width)
        self.bins = max(self.bins, place + 1)
        return place

    def _halve(self) -> None:
        for columns, joined in (
            (self._totals, float.__add__),
            (self._counts, float.__add__),
            (self._newest, _newer),
        ):
            for key, column in columns.items():
                columns[key] = _joined(column, joined)
        self.width *= 2
        self.bins = (self.bins + 1) // 2
        self.generation += 1


def _column(columns: dict[str, array[float]], key: str, size: int, empty: float) -> array[float]:
    """The column of a key, with a value for each bin."""
    column = columns.get(key)
    if column is None:
        column = columns[key] = array("d")
    if len(column) < size:
        column.extend([empty] * (size - len(column)))
    return column


def _joined(column: array[float], join: Callable[[float, float], float]) -> array[float]:
    pairs = array("d", map(join, column[::2], column[1::2]))
    if len(column) % 2:
        pairs.append(column[-1])
    return pairs


def _newer(first: float, second: float) -> float:
    return first if math.isnan(second) else second
