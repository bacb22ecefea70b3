# SPDX-License-Identifier: Apache-2.0
"""Rows in two layers: an upper one with the rows that changed, over a lower one.

A layer has the slots of an index (`probing.py`) and rows by number. The upper layer marks ids that
have no row any more, though the lower layer has one.
"""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Codes, Floats, Grid, Ids, Int64s, Matrix
from fleetlight.kernels.compiling.kernel import kernel, part
from fleetlight.kernels.compiling.prefetching import prefetch
from fleetlight.kernels.ids.hashing import hash_of
from fleetlight.kernels.rows import probing
from fleetlight.kernels.rows.probing import (
    IDS,
    WORDS,
    line_after,
    line_of,
    place,
    search,
    search_line,
)
from fleetlight.kernels.rows.row_access import ahead, ask

#: the row number of a removed id
REMOVED = 2**31 - 1
#: what is added to the row numbers of the lower layer
_BELOW = 2**32
#: the maximum load factors of a lower and an upper index; most ids are not in the upper one, and in
#: a sparse index a search for them ends in the first line
LOWER_LOAD, UPPER_LOAD = 0.7, 0.35
_MIN_WORDS = 16 * WORDS
_AHEAD = 128
#: places in `counters`: rows in use; ids with a row, and removed ids
USED, KNOWN = range(2)
_IDS, _LAST = np.uint64(IDS), np.uint64(WORDS - 1)


def words_for(ids: int, load: float = LOWER_LOAD) -> int:
    """The words of an index with room for so many ids."""
    slots = max(_MIN_WORDS // 2, 1 << int(ids / load).bit_length())
    return 2 * slots


def grow(slots: Int64s, larger: Int64s) -> None:
    """Copy the entries of an index into an empty, larger one."""
    probing.migrate(slots, 0, len(slots), larger)


def find_layered(ids: Ids, upper: Int64s, lower: Int64s, numbers: Int64s) -> int:
    """Find the row of each id in two layers, or in `lower` alone where `upper` is empty.

    Returns how many ids have no row; their number is -1.
    """
    if not len(upper):
        return probing.find(ids, lower, numbers, np.empty(len(ids), np.int64))
    return _find_in_both(ids, upper, lower, numbers)


@part
def _lower_number(found: np.int64) -> np.int64:
    """The number of a row of the lower layer, from its number there plus 1; -1 for none."""
    return found + (_BELOW - 1) if 0 < found <= REMOVED else np.int64(-1)


@kernel
def _find_in_both(ids: Ids, upper: Int64s, lower: Int64s, numbers: Int64s) -> int:
    homes, places = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    for i in range(len(ids)):
        homes[i] = np.int64(hash_of(ids[i]))
    below = 0
    for i in range(len(ids)):
        if i + _AHEAD < len(ids):
            prefetch(upper, line_of(upper, np.uint64(homes[i + _AHEAD])))
        home = np.uint64(homes[i])
        line = line_of(upper, home)
        found = search_line(upper, ids[i], line)
        if found == 0 and upper[line + _LAST] != 0:  # rare, as the upper index is sparse
            found = search(upper, ids[i], home)
        numbers[i] = found - 1
        # always written, counted only if not found: no branch
        places[below] = i
        below += np.int64(found == 0)
    elsewhere = 0
    for k in range(below):
        if k + _AHEAD < below:
            soon = np.uint64(places[k + _AHEAD])
            prefetch(lower, line_of(lower, np.uint64(homes[soon])))
        i = np.uint64(places[k])
        found = search_line(lower, ids[i], line_of(lower, np.uint64(homes[i])))
        numbers[i] = _lower_number(found)
        places[elsewhere] = places[k]
        elsewhere += np.int64(found == 0)
    unknown = 0
    for k in range(elsewhere):
        if k + _AHEAD < elsewhere:
            soon = np.uint64(places[k + _AHEAD])
            prefetch(lower, line_after(lower, line_of(lower, np.uint64(homes[soon]))))
        i = np.uint64(places[k])
        found = search(lower, ids[i], np.uint64(homes[i]))
        numbers[i] = _lower_number(found)
        unknown += np.int64(found == 0)
    return unknown


@kernel
def read_layered(upper: Floats, lower: Floats, numbers: Int64s, out: Matrix) -> int:
    """Read the row of each number; returns how many have none, whose number becomes -1."""
    dim = out.shape[1]
    early = ahead(dim)
    unknown = 0
    for i in range(len(numbers)):
        if i + early < len(numbers):
            soon = numbers[i + early]
            if soon >= _BELOW:
                ask(lower, np.uint64(soon - _BELOW) * np.uint64(dim), dim)
            elif 0 <= soon < REMOVED:
                ask(upper, np.uint64(soon) * np.uint64(dim), dim)
        number = numbers[i]
        if number >= _BELOW:
            at = np.uint64(number - _BELOW) * np.uint64(dim)
            for c in range(dim):
                out[i, c] = lower[at + np.uint64(c)]
        elif 0 <= number < REMOVED:
            at = np.uint64(number) * np.uint64(dim)
            for c in range(dim):
                out[i, c] = upper[at + np.uint64(c)]
        else:
            numbers[i] = -1
            unknown += 1
    return unknown


@part
def _position_of(slots: Int64s, one: np.int64, home: np.uint64) -> np.int64:
    """The position of an id, or -1."""
    line = line_of(slots, home)
    while True:
        for k in range(IDS):
            at = line + np.uint64(k)
            if slots[at + _IDS] != 0 and slots[at] == one:
                return np.int64(at)
        if slots[line + _LAST] == 0:
            return np.int64(-1)
        line = line_after(slots, line)


@kernel
def upsert(
    ids: Ids, removed: Codes, values: Grid, slots: Int64s, rows: Floats, counters: Int64s
) -> None:
    """Set the rows of ids, or mark them as removed; slots and rows must have room.

    Of a repeated id the last row counts.
    """
    dim = values.shape[1]
    for i in range(len(ids)):
        if i + _AHEAD < len(ids):
            prefetch(slots, line_of(slots, hash_of(ids[i + _AHEAD])))
        home = hash_of(ids[i])
        at = _position_of(slots, ids[i], home)
        number = slots[np.uint64(at) + _IDS] - 1 if at >= 0 else np.int64(REMOVED)
        if removed[i] != 0:
            number = np.int64(REMOVED)
        elif number == REMOVED:
            number = counters[USED]
            counters[USED] += 1
        if at >= 0:
            slots[np.uint64(at) + _IDS] = number + 1
        else:
            place(slots, ids[i], number, home)
            counters[KNOWN] += 1
        if number != REMOVED:
            to = np.uint64(number) * np.uint64(dim)
            for c in range(dim):
                rows[to + np.uint64(c)] = values[i, c]
