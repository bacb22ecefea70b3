# SPDX-License-Identifier: Apache-2.0
"""The row number of an id: a hash table of cache lines.

A line has up to four ids, then their row numbers plus 1; entries in use come first. An id is
stored in the line of its hash, or in the first later line that had room. So a search ends at a line
that is not full. Most ids are in the line of their hash, which is one access to memory. The four
are compared without a branch, because a mispredicted branch costs more than the comparisons.

A growing index has an old and a new table. Moved entries stay in the old one, which is harmless,
because an id keeps its row number. Entries removed meanwhile are marked GONE there.
"""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Ids, Int32s, Int64s, Uint32s
from fleetlight.kernels.compiling.kernel import kernel, part
from fleetlight.kernels.compiling.prefetching import prefetch
from fleetlight.kernels.ids.hashing import hash_of
from fleetlight.kernels.rows.slab import FREED, FRESH, LIVE, TOP

#: ids in a line, and words
IDS, WORDS = 4, 8
GONE = -1
_AHEAD = 128

_ONE, _TWO, _IDS, _WORDS = np.uint64(1), np.uint64(2), np.uint64(IDS), np.uint64(WORDS)
_LAST = np.uint64(WORDS - 1)
_LOW = np.uint64(0xFFFFFFFF)
_SOON = np.uint64(8 * WORDS)


@part
def line_of(slots: Int64s, home: np.uint64) -> np.uint64:
    """The start of the line of a hash."""
    return (home & np.uint64(len(slots) // WORDS - 1)) * _WORDS


@part
def line_after(slots: Int64s, line: np.uint64) -> np.uint64:
    """The start of the next line; the first line follows the last."""
    return (line + _WORDS) & np.uint64(len(slots) - 1)


@part
def search_line(slots: Int64s, one: np.int64, line: np.uint64) -> np.int64:
    """The row number plus 1 of an id in this line, 0 if the line does not have it."""
    # Counts the unequal ids before it among the first three. The first equal id counts: free
    # places may hold any id, and come after those in use.
    other = np.uint64(slots[line] != one)
    at = line + other
    other &= np.uint64(slots[line + _ONE] != one)
    at += other
    other &= np.uint64(slots[line + _TWO] != one)
    at += other
    return slots[at + _IDS] * np.int64(slots[at] == one)


@part
def search(slots: Int64s, one: np.int64, home: np.uint64) -> np.int64:
    """The row number plus 1 of an id, 0 if it is unknown."""
    line = line_of(slots, home)
    found = search_line(slots, one, line)
    while found == 0 and slots[line + _LAST] != 0:
        line = line_after(slots, line)
        found = search_line(slots, one, line)
    return found


@part
def search_row(slots: Int64s, row: np.int64, home: np.uint64) -> np.int64:
    """The position of the id of a row number, or -1."""
    line = line_of(slots, home)
    while True:
        for k in range(IDS):
            if slots[line + np.uint64(k) + _IDS] == row + 1:
                return np.int64(line + np.uint64(k))
        if slots[line + _LAST] == 0:
            return np.int64(-1)
        line = line_after(slots, line)


@part
def place(slots: Int64s, one: np.int64, row: np.int64, home: np.uint64) -> None:
    """Put a new id into the first line that has room."""
    line = line_of(slots, home)
    while slots[line + _LAST] != 0:
        line = line_after(slots, line)
    while slots[line + _IDS] != 0:
        line += _ONE
    slots[line], slots[line + _IDS] = one, row + 1


@part
def _take_row(freed: Int32s, capacity: int, counters: Int64s) -> np.int64:
    """A free row number, or -1 if there is none."""
    if counters[FREED] > 0:
        counters[FREED] -= 1
        return np.int64(freed[np.uint64(counters[FREED])])
    if counters[TOP] < capacity:
        counters[TOP] += 1
        return counters[TOP] - 1
    return np.int64(-1)


@kernel
def find(ids: Ids, slots: Int64s, numbers: Int64s, missing: Int64s) -> int:
    """Find the row number of each id, -1 if unknown; return how many positions are `missing`."""
    for i in range(len(ids)):
        numbers[i] = np.int64(hash_of(ids[i]))
    elsewhere = 0
    for i in range(len(ids)):
        if i + _AHEAD < len(ids):
            prefetch(slots, line_of(slots, np.uint64(numbers[i + _AHEAD])))
        found = search_line(slots, ids[i], line_of(slots, np.uint64(numbers[i])))
        numbers[i] = found - 1
        # always written, counted only if not found: no branch
        missing[elsewhere] = i
        elsewhere += np.int64(found == 0)
    # one in ten is in a later line, which must be prefetched as well
    unknown = 0
    for k in range(elsewhere):
        if k + _AHEAD < elsewhere:
            soon = hash_of(ids[np.uint64(missing[k + _AHEAD])])
            prefetch(slots, line_after(slots, line_of(slots, soon)))
        i = np.uint64(missing[k])
        found = search(slots, ids[i], hash_of(ids[i]))
        numbers[i] = found - 1
        missing[unknown] = missing[k]
        unknown += np.int64(found == 0)
    return unknown


@kernel
def find_in_old(ids: Ids, old: Int64s, numbers: Int64s, missing: Ids) -> None:
    """Look for missing ids in the index that is being moved."""
    for k in range(len(missing)):
        if k + _AHEAD < len(missing):
            prefetch(old, line_of(old, hash_of(ids[np.uint64(missing[k + _AHEAD])])))
        i = np.uint64(missing[k])
        found = search(old, ids[i], hash_of(ids[i]))
        if found > 0:
            numbers[i] = found - 1


@kernel
def insert(
    ids: Ids,
    numbers: Int64s,
    missing: Ids,
    slots: Int64s,
    homes: Uint32s,
    freed: Int32s,
    counters: Int64s,
    limit: int,
    capacity: int,
    fresh: Int64s,
) -> int:
    """Give rows to missing ids; `fresh` gets the positions of ids with a new row.

    Returns how many ids were handled: fewer than all if the index or the slab is full.
    """
    counters[FRESH] = 0
    for k in range(len(missing)):
        i = np.uint64(missing[k])
        home = hash_of(ids[i])
        if numbers[i] < 0:  # not found in the old index; the batch may repeat it
            numbers[i] = search(slots, ids[i], home) - 1
        if numbers[i] >= 0:
            continue
        row = _take_row(freed, capacity, counters) if counters[LIVE] < limit else np.int64(-1)
        if row < 0:
            return k
        place(slots, ids[i], row, home)
        numbers[i] = row
        homes[np.uint64(row)] = np.uint32(home & _LOW)
        fresh[np.uint64(counters[FRESH])] = missing[k]
        counters[FRESH] += 1
        counters[LIVE] += 1
    return len(missing)


@kernel
def migrate(old: Int64s, start: int, stop: int, slots: Int64s) -> None:
    """Move whole lines, the words from start to stop, into the larger index."""
    for line in range(start, stop, WORDS):
        for k in range(IDS):
            at = np.uint64(line + k)
            if at + _SOON < np.uint64(stop):
                prefetch(slots, line_of(slots, hash_of(old[at + _SOON])))
            if old[at + _IDS] > 0:
                place(slots, old[at], old[at + _IDS] - 1, hash_of(old[at]))


@kernel
def ids_of(numbers: Ids, slots: Int64s, old: Int64s, homes: Uint32s, top: int, ids: Int64s) -> int:
    """Read the id of each row; return how many were read before an unused row."""
    for i in range(len(numbers)):
        if i + _AHEAD < len(numbers) and 0 <= numbers[i + _AHEAD] < top:
            prefetch(slots, line_of(slots, np.uint64(homes[np.uint64(numbers[i + _AHEAD])])))
        if not 0 <= numbers[i] < top:
            return i
        home = np.uint64(homes[np.uint64(numbers[i])])
        at = search_row(slots, numbers[i], home)
        if at >= 0:
            ids[i] = slots[np.uint64(at)]
            continue
        at = search_row(old, numbers[i], home) if len(old) > 0 else np.int64(-1)
        if at < 0:
            return i
        ids[i] = old[np.uint64(at)]
    return len(numbers)


@kernel
def forget(
    numbers: Ids, slots: Int64s, old: Int64s, homes: Uint32s, freed: Int32s, counters: Int64s
) -> int:
    """Remove rows and list them as free; skip unused rows. Returns how many were removed."""
    before = counters[LIVE]
    for i in range(len(numbers)):
        if not 0 <= numbers[i] < counters[TOP]:
            continue
        home = np.uint64(homes[np.uint64(numbers[i])])
        at = search_row(slots, numbers[i], home)
        known = bool(at >= 0)
        if known:
            _take_out(slots, np.uint64(at))
        at = search_row(old, numbers[i], home) if len(old) > 0 else np.int64(-1)
        if at >= 0:
            old[np.uint64(at) + _IDS] = GONE
            known = True
        if known:
            freed[np.uint64(counters[FREED])] = numbers[i]
            counters[FREED] += 1
            counters[LIVE] -= 1
    return int(before - counters[LIVE])


@part
def _take_out(slots: Int64s, gap: np.uint64) -> None:
    """Empty a place; if its line was full, move an id there from a later line."""
    mask = np.uint64(len(slots) - 1)
    line = gap & ~_LAST
    was_full = _close(slots, line, gap)
    behind = line
    while was_full:
        behind = line_after(slots, behind)
        last = bool(slots[behind + _LAST] == 0)
        for k in range(IDS):
            at = behind + np.uint64(k)
            home = line_of(slots, hash_of(slots[at]))
            # its hash says the line with the gap or an earlier one, which was full
            if slots[at + _IDS] != 0 and ((behind - home) & mask) >= ((behind - line) & mask):
                slots[line + _LAST - _IDS], slots[line + _LAST] = slots[at], slots[at + _IDS]
                was_full = _close(slots, behind, at)
                line, last = behind, False
                break
        if last:
            return


@part
def _close(slots: Int64s, line: np.uint64, gap: np.uint64) -> bool:
    """Move the last id of a line into the gap; return whether the line was full."""
    was_full = slots[line + _LAST] != 0
    end = line + _IDS
    while end > line + _ONE and slots[end - _ONE + _IDS] == 0:
        end -= _ONE
    slots[gap], slots[gap + _IDS] = slots[end - _ONE], slots[end - _ONE + _IDS]
    slots[end - _ONE + _IDS] = 0
    return bool(was_full)
