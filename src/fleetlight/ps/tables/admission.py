# SPDX-License-Identifier: Apache-2.0
"""Which ids of a table get a row that learns, and what is counted of them.

The counts are meta data of the rows: how often a row's id was seen (or shown), how often clicked,
for how many days not at all, and whether it has been let in. A day passes with `fleet.shrink`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import PlanError, did_you_mean
from fleetlight.kernels import RowTable, splitmix64
from fleetlight.ps.plan import EntryPlan
from fleetlight.ps.update import Floats, Ids

#: columns of the meta data
SEEN, CLICKS, UNSEEN_DAYS, LET_IN = range(4)
META_WIDTH = 4
_SHOW_WEIGHT, _CLICK_WEIGHT = 0.1, 1.0

Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Admission:
    """Lets every id in when it is first seen; its shows and clicks come with the pushes."""

    def __init__(self, value: float, seed: int) -> None:
        self._value = value
        self._seed = seed

    def give_rows(self, table: RowTable, ids: Ids, step: int) -> Numbers:
        """Rows for those ids of a training pull that may have one; their numbers, or -1."""
        return table.insert(ids)

    def count_sighting(self, table: RowTable, numbers: Numbers) -> None:
        """A worker has pulled these rows to train with them."""
        meta_of(table)[numbers, UNSEEN_DAYS] = 0

    def learning(self, table: RowTable, ids: Ids) -> Mask:
        """Which ids' gradients are applied."""
        return np.ones(len(ids), np.bool_)


class CountAdmission(Admission):
    """An id has a row from the start, where it is counted, and learns once seen often enough."""

    def count_sighting(self, table: RowTable, numbers: Numbers) -> None:
        """See `Admission`."""
        meta = meta_of(table)
        seen = meta[numbers, SEEN] + 1
        meta[numbers, SEEN] = seen
        meta[numbers, UNSEEN_DAYS] = 0
        # noted for good, so that counts which decay do not shut it out again
        meta[numbers[seen >= self._value], LET_IN] = 1

    def learning(self, table: RowTable, ids: Ids) -> Mask:
        """See `Admission`."""
        numbers = table.find(ids)
        known = numbers >= 0
        known[known] = meta_of(table)[numbers[known], LET_IN] > 0
        return known


class ChanceAdmission(Admission):
    """Each time an unknown id is seen it gets a row by chance; without one it does not learn."""

    def give_rows(self, table: RowTable, ids: Ids, step: int) -> Numbers:
        """See `Admission`."""
        numbers = table.find(ids)
        unknown = np.flatnonzero(numbers < 0)
        lucky = unknown[self._draw(ids[unknown], step) < self._value]
        numbers[lucky] = table.insert(ids[lucky])
        return numbers

    def count_sighting(self, table: RowTable, numbers: Numbers) -> None:
        """See `Admission`."""
        meta = meta_of(table)
        meta[numbers, SEEN] += 1
        meta[numbers, UNSEEN_DAYS] = 0

    def learning(self, table: RowTable, ids: Ids) -> Mask:
        """See `Admission`."""
        known: Mask = table.find(ids) >= 0
        return known

    def _draw(self, ids: Ids, step: int) -> NDArray[np.float64]:
        """A number from 0 to 1 for each id: the same wherever and whenever it is drawn."""
        salt = splitmix64(splitmix64([step]).view(np.int64) ^ np.int64(self._seed))
        bits = splitmix64(ids ^ salt.view(np.int64)) >> np.uint64(11)
        return np.asarray(bits * 2.0**-53, np.float64)


_KINDS: dict[str, type[Admission]] = {
    "count": CountAdmission,
    "probability": ChanceAdmission,
    "show_click": Admission,
}


def admission_of(plan: EntryPlan, seed: int) -> Admission:
    """The admission that an entry asks for, drawing by the seed of its table."""
    if plan.kind not in _KINDS:
        raise PlanError(f"entry {plan.kind!r}: {did_you_mean(plan.kind, _KINDS)}")
    return _KINDS[plan.kind](plan.value, seed)


def meta_of(table: RowTable) -> Floats:
    """The meta data of all rows; a view that is good until the table grows."""
    return table.rows[:, -META_WIDTH:]


def note_push(table: RowTable, ids: Ids, shows: Floats | None, clicks: Floats | None) -> None:
    """Distinct ids were pushed: add what came along."""
    numbers = table.find(ids)
    meta = meta_of(table)
    known = numbers >= 0
    meta[numbers[known], UNSEEN_DAYS] = 0
    for column, counts in ((SEEN, shows), (CLICKS, clicks)):
        if counts is not None:
            meta[numbers[known], column] += counts[known]


def pass_day(
    table: RowTable, numbers: Numbers, unseen_days: int, score: float, decay: float
) -> Mask:
    """End a day for these rows; return which of them to forget."""
    meta = meta_of(table)[numbers]
    meta[:, UNSEEN_DAYS] += 1
    meta[:, [SEEN, CLICKS]] *= np.float32(decay)
    meta_of(table)[numbers] = meta
    worth = _SHOW_WEIGHT * (meta[:, SEEN] - meta[:, CLICKS]) + _CLICK_WEIGHT * meta[:, CLICKS]
    unseen: Mask = meta[:, UNSEEN_DAYS] > unseen_days
    return (unseen & (unseen_days > 0)) | (worth < score)
