# SPDX-License-Identifier: Apache-2.0
"""`Eviction`: which rows leave a table that has a maximum of rows.

A push that finds no room removes a tenth of the rows at once, those with the lowest rank, so that
the cost of ranking all rows is divided among many pushes. The order of ranks depends on counts and
ids alone, not on row numbers. So a server that repeats its log removes the same rows, and in sync
mode the number of workers does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels import RowTable, splitmix64
from fleetlight.ps.tables.counts.admission import CLICKS, LAST, SEEN, Mask, Numbers, worth
from fleetlight.ps.update import Ids

#: from row numbers to a value of each row
Rank: TypeAlias = Callable[[RowTable, NDArray[np.integer]], NDArray[Any]]
#: a push that finds no room removes at least this part of the rows
_PART = 10
_NOBODY: Numbers = np.empty(0, np.int64)


class Eviction:
    """Chooses rows by age (unseen longest), by count (fewest shows) or by score (lowest)."""

    def __init__(self, most: int, order: str) -> None:
        """`most`: the rows of the table on this server."""
        self._most, self._ranks = most, _RANKS[order]
        #: the pushes so far: what `LAST` of a row is set to
        self.clock = 0

    def pushed(self) -> None:
        """Count a push, before its rows are stamped."""
        self.clock += 1

    def resume(self, clock: int) -> None:
        """Continue after a file; of several the latest counts."""
        self.clock = max(self.clock, clock)

    def stamp(self, table: RowTable, numbers: Numbers) -> None:
        """Note that rows were used; -1 is skipped."""
        table.meta[numbers[numbers >= 0], LAST] = self.clock

    def chosen(self, table: RowTable, ids: Ids, learning: Mask) -> Numbers:
        """The rows to remove before these distinct ids are pushed; their own rows stay.

        Unknown ids that are `learning` get a row.
        """
        if len(table) + len(ids) <= self._most:
            return _NOBODY
        numbers = table.find(ids)
        known = numbers[numbers >= 0]
        excess = len(table) + int(np.sum((numbers < 0) & learning)) - self._most
        if excess <= 0:
            return _NOBODY
        may_leave = np.zeros(table.top, np.bool_)
        may_leave[table.numbers] = True
        may_leave[known] = False
        others = np.flatnonzero(may_leave)
        count = min(max(excess, self._most // _PART), len(others))
        return _lowest(table, others, count, self._ranks).astype(np.int64)


def _lowest(
    table: RowTable, numbers: NDArray[Any], count: int, ranks: Sequence[Rank]
) -> NDArray[Any]:
    """The `count` rows of lowest rank; the next rank decides among equal rows."""
    if count >= len(numbers) or not ranks:
        return numbers[:count]
    values = ranks[0](table, numbers)
    limit = np.partition(values, count)[count]
    sure, equal = numbers[values < limit], numbers[values == limit]
    rest = _lowest(table, equal, count - len(sure), ranks[1:])
    return np.concatenate([sure, rest])


def _last(table: RowTable, numbers: NDArray[np.integer]) -> NDArray[Any]:
    last: NDArray[Any] = table.meta[numbers, LAST]
    return last


def _shows(table: RowTable, numbers: NDArray[np.integer]) -> NDArray[Any]:
    shows: NDArray[Any] = np.nan_to_num(table.meta[numbers, SEEN], copy=False)
    return shows


def _score(table: RowTable, numbers: NDArray[np.integer]) -> NDArray[Any]:
    clicks = np.nan_to_num(table.meta[numbers, CLICKS], copy=False)
    return worth(_shows(table, numbers), clicks)


def _hash(table: RowTable, numbers: NDArray[np.integer]) -> NDArray[Any]:
    return splitmix64(table.ids_of(numbers))


#: by the setting of the layer
_RANKS: dict[str, tuple[Rank, ...]] = {
    "age": (_last, _hash),
    "count": (_shows, _last, _hash),
    "score": (_score, _last, _hash),
}
