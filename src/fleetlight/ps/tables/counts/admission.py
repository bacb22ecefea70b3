# SPDX-License-Identifier: Apache-2.0
"""Admission: which ids of a table get a row that learns, and the counts of each row.

The counts are metadata of a row: how often its id was seen (or shown), how often it was clicked,
for how many days it was unseen, and whether it was admitted. `fleet.shrink` ends a day. A table
with a maximum of rows also has the push that used a row last, and counts without an entry, too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fleetlight.errors import PlanError, did_you_mean
from fleetlight.kernels import RowTable, splitmix64
from fleetlight.ps.plan import SCORE, SHOW_CLICK, EntryPlan, TablePlan
from fleetlight.ps.update import Floats, Ids

#: columns of the metadata; the last one only where there is a maximum of rows
SEEN, CLICKS, UNSEEN_DAYS, LET_IN, LAST = range(5)
_SHOW_WEIGHT, _CLICK_WEIGHT = 0.1, 1.0

Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Admission:
    """Admits every id when it is first seen; pushes bring its shows and clicks."""

    #: whether training pulls are counted, or insert rows
    counts_pulls = False

    def __init__(self, value: float, seed: int) -> None:
        self._value = value
        self._seed = seed

    def give_rows(self, table: RowTable, ids: Ids, step: int) -> Numbers:
        """Give rows to the ids of a training pull that may have one; return row numbers, or -1."""
        return table.insert(ids)

    def count_sighting(self, table: RowTable, numbers: Numbers) -> None:
        """Count that a worker pulled these rows for training."""
        table.meta[numbers, UNSEEN_DAYS] = 0

    def learning(self, table: RowTable, ids: Ids) -> Mask:
        """A mask of the ids whose gradients are applied."""
        return np.ones(len(ids), np.bool_)


class CountAdmission(Admission):
    """Every id has a row, where it is counted; it learns when it was seen often enough."""

    counts_pulls = True

    def count_sighting(self, table: RowTable, numbers: Numbers) -> None:
        """See `Admission`."""
        meta = table.meta
        seen = meta[numbers, SEEN] + 1
        meta[numbers, SEEN] = seen
        meta[numbers, UNSEEN_DAYS] = 0
        # permanent: a decayed count does not revoke the admission
        meta[numbers[seen >= self._value], LET_IN] = 1

    def learning(self, table: RowTable, ids: Ids) -> Mask:
        """See `Admission`."""
        numbers = table.find(ids)
        known = numbers >= 0
        known[known] = table.meta[numbers[known], LET_IN] > 0
        return known


class ChanceAdmission(Admission):
    """An unknown id gets a row with a probability each time it is seen; without it, no learning."""

    counts_pulls = True

    def give_rows(self, table: RowTable, ids: Ids, step: int) -> Numbers:
        """See `Admission`."""
        numbers = table.find(ids)
        unknown = np.flatnonzero(numbers < 0)
        lucky = unknown[self._draw(ids[unknown], step) < self._value]
        numbers[lucky] = table.insert(ids[lucky])
        return numbers

    def count_sighting(self, table: RowTable, numbers: Numbers) -> None:
        """See `Admission`."""
        meta = table.meta
        meta[numbers, SEEN] += 1
        meta[numbers, UNSEEN_DAYS] = 0

    def learning(self, table: RowTable, ids: Ids) -> Mask:
        """See `Admission`."""
        known: Mask = table.find(ids) >= 0
        return known

    def _draw(self, ids: Ids, step: int) -> NDArray[np.float64]:
        """A random number from 0 to 1 for each id, a function of seed, step and id."""
        salt = splitmix64(splitmix64([step]).view(np.int64) ^ np.int64(self._seed))
        bits = splitmix64(ids ^ salt.view(np.int64)) >> np.uint64(11)
        return np.asarray(bits * 2.0**-53, np.float64)


class ScoreAdmission(Admission):
    """A training pull gives an id a row once its score in another table is high enough."""

    counts_pulls = True
    #: the scores of ids in that table; ids without a row there have the score 0
    scores: Callable[[Ids], Floats]

    def give_rows(self, table: RowTable, ids: Ids, step: int) -> Numbers:
        """See `Admission`."""
        numbers = table.find(ids)
        unknown = np.flatnonzero(numbers < 0)
        high = unknown[self.scores(ids[unknown]) >= self._value]
        numbers[high] = table.insert(ids[high])
        return numbers

    def count_sighting(self, table: RowTable, numbers: Numbers) -> None:
        """Count nothing: the other table does."""

    def learning(self, table: RowTable, ids: Ids) -> Mask:
        """See `Admission`."""
        known: Mask = table.find(ids) >= 0
        return known


_KINDS: dict[str, type[Admission]] = {
    "count": CountAdmission,
    "probability": ChanceAdmission,
    SHOW_CLICK: Admission,
    SCORE: ScoreAdmission,
}


def meta_width(plan: TablePlan) -> int:
    """The columns of metadata of a table."""
    return LAST + 1 if plan.max_rows else LAST if plan.is_counted else 0


def admission_of(plan: EntryPlan | None, seed: int) -> Admission:
    """The admission of an entry; random numbers come from the seed of the table."""
    if plan is None:
        return Admission(0.0, seed)
    if plan.kind not in _KINDS:
        raise PlanError(f"entry {plan.kind!r}: {did_you_mean(plan.kind, _KINDS)}")
    return _KINDS[plan.kind](plan.value, seed)


def note_push(table: RowTable, ids: Ids, shows: Floats | None, clicks: Floats | None) -> None:
    """Add the shows and clicks of a push of distinct ids."""
    numbers = table.find(ids)
    meta = table.meta
    known = numbers >= 0
    meta[numbers[known], UNSEEN_DAYS] = 0
    for column, counts in ((SEEN, shows), (CLICKS, clicks)):
        if counts is not None:
            meta[numbers[known], column] += counts[known]


def scores(table: RowTable, ids: Ids) -> Floats:
    """The score of each id, 0 without a row."""
    numbers = table.find(ids)
    found, known = np.zeros(len(ids), np.float32), numbers >= 0
    meta = table.meta[numbers[known]]
    found[known] = worth(meta[:, SEEN], meta[:, CLICKS])
    return found


def pass_day(
    table: RowTable, numbers: Numbers, unseen_days: int, score: float, decay: float
) -> Mask:
    """End a day for these rows; return a mask of the rows to remove."""
    meta = table.meta[numbers]
    meta[:, UNSEEN_DAYS] += 1
    meta[:, [SEEN, CLICKS]] *= np.float32(decay)
    table.meta[numbers] = meta
    unseen: Mask = meta[:, UNSEEN_DAYS] > unseen_days
    return (unseen & (unseen_days > 0)) | (worth(meta[:, SEEN], meta[:, CLICKS]) < score)


def worth(shows: Floats, clicks: Floats) -> Floats:
    """The score of each row."""
    score: Floats = _SHOW_WEIGHT * (shows - clicks) + _CLICK_WEIGHT * clicks
    return score
