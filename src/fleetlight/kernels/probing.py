# SPDX-License-Identifier: Apache-2.0
"""Which row number an id has: open addressing with linear probing, two words a slot.

A slot holds an id and its row number plus 1; 0 ends a search. While an index grows there are two.
What was moved from the old one stays behind, which does no harm, because an id keeps its row
number; what is removed meanwhile is marked GONE there.
"""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Ids, Int32s, Int64s, Uint32s
from fleetlight.kernels.compiling import kernel, part
from fleetlight.kernels.hashing import hash_of
from fleetlight.kernels.prefetching import prefetch
from fleetlight.kernels.slab import FREED, FRESH, LIVE, TOP

GONE = -1
_AHEAD = 32
_ONE, _TWO = np.uint64(1), np.uint64(2)


@part
def seek(slots: Int64s, one: np.int64, place: np.uint64) -> np.uint64:
    """The slot of an id, looked for from `place` on; or the empty slot that ends the search."""
    mask = np.uint64(len(slots) // 2 - 1)
    place &= mask
    while slots[_TWO * place + _ONE] != 0 and slots[_TWO * place] != one:
        place = (place + _ONE) & mask
    return place


@part
def seek_row(slots: Int64s, row: np.int64, place: np.uint64) -> np.uint64:
    """The slot of a row number, or the empty slot that ends the search."""
    mask = np.uint64(len(slots) // 2 - 1)
    place &= mask
    while slots[_TWO * place + _ONE] != 0 and slots[_TWO * place + _ONE] != row + 1:
        place = (place + _ONE) & mask
    return place


@part
def _take_row(freed: Int32s, capacity: int, counters: Int64s) -> np.int64:
    """A row number that is not in use, or -1 when there is none."""
    if counters[FREED] > 0:
        counters[FREED] -= 1
        return np.int64(freed[np.uint64(counters[FREED])])
    if counters[TOP] < capacity:
        counters[TOP] += 1
        return np.int64(counters[TOP] - 1)
    return np.int64(-1)


@kernel
def locate(
    ids: Ids,
    numbers: Int64s,
    slots: Int64s,
    old: Int64s,
    homes: Uint32s,
    freed: Int32s,
    counters: Int64s,
    limit: int,
    capacity: int,
    insert: bool,
    fresh: Int64s,
) -> int:
    """The row number of each id, -1 for unknown ones; or with `insert`, a row for these too.

    Answers how many ids it got through: fewer than all when the index or the slab is full. Which of
    them have new rows stands in `fresh`, and how many in `counters`.
    """
    mask, old_mask = np.uint64(len(slots) // 2 - 1), np.uint64(len(old) // 2 - 1)
    counters[FRESH] = 0
    for i in range(len(ids)):
        numbers[i] = np.int64(hash_of(ids[i]))
    for i in range(len(ids)):
        if i + _AHEAD < len(ids):
            soon = np.uint64(numbers[i + _AHEAD])
            prefetch(slots, _TWO * (soon & mask))
            if len(old) > 0:
                prefetch(old, _TWO * (soon & old_mask))
        home = np.uint64(numbers[i])
        place = seek(slots, ids[i], home)
        found = slots[_TWO * place + _ONE]
        if found == 0 and len(old) > 0:
            found = old[_TWO * seek(old, ids[i], home) + _ONE]
        if found <= 0:
            found = np.int64(0)
            if insert:
                if counters[LIVE] >= limit:
                    return i
                found = _take_row(freed, capacity, counters) + 1
                if found == 0:
                    return i
                slots[_TWO * place], slots[_TWO * place + _ONE] = ids[i], found
                homes[np.uint64(found - 1)] = np.uint32(home & np.uint64(0xFFFFFFFF))
                fresh[np.uint64(counters[FRESH])] = i
                counters[FRESH] += 1
                counters[LIVE] += 1
        numbers[i] = found - 1
    return len(ids)


@kernel
def migrate(old: Int64s, start: int, stop: int, slots: Int64s) -> None:
    """Move the slots from start to stop into the larger index."""
    mask = np.uint64(len(slots) // 2 - 1)
    for at in range(start, stop):
        if at + _AHEAD < stop:
            soon = np.uint64(at + _AHEAD)
            prefetch(slots, _TWO * (hash_of(old[_TWO * soon]) & mask))
        one, row = old[_TWO * np.uint64(at)], old[_TWO * np.uint64(at) + _ONE]
        if row > 0:
            place = seek(slots, one, hash_of(one))
            slots[_TWO * place], slots[_TWO * place + _ONE] = one, row


@kernel
def ids_of(numbers: Ids, slots: Int64s, old: Int64s, homes: Uint32s, top: int, ids: Int64s) -> int:
    """The id of each row; answers how many were read before one that is not in use."""
    mask = np.uint64(len(slots) // 2 - 1)
    for i in range(len(numbers)):
        if i + _AHEAD < len(numbers) and 0 <= numbers[i + _AHEAD] < top:
            prefetch(slots, _TWO * (np.uint64(homes[np.uint64(numbers[i + _AHEAD])]) & mask))
        row = numbers[i]
        if not 0 <= row < top:
            return i
        home = np.uint64(homes[np.uint64(row)])
        place = seek_row(slots, row, home)
        if slots[_TWO * place + _ONE] != 0:
            ids[i] = slots[_TWO * place]
            continue
        if len(old) == 0:
            return i
        place = seek_row(old, row, home)
        if old[_TWO * place + _ONE] == 0:
            return i
        ids[i] = old[_TWO * place]
    return len(numbers)


@kernel
def forget(
    numbers: Ids, slots: Int64s, old: Int64s, homes: Uint32s, freed: Int32s, counters: Int64s
) -> int:
    """Remove rows and note them as free; those not in use are passed over. How many there were."""
    before = counters[LIVE]
    for i in range(len(numbers)):
        row = numbers[i]
        if not 0 <= row < counters[TOP]:
            continue
        home = np.uint64(homes[np.uint64(row)])
        place = seek_row(slots, row, home)
        known = slots[_TWO * place + _ONE] != 0
        if known:
            _close_gap(slots, place)
        if len(old) > 0:
            place = seek_row(old, row, home)
            if old[_TWO * place + _ONE] != 0:
                old[_TWO * place + _ONE] = GONE
                known = True
        if known:
            freed[np.uint64(counters[FREED])] = row
            counters[FREED] += 1
            counters[LIVE] -= 1
    return int(before - counters[LIVE])


@part
def _close_gap(slots: Int64s, gap: np.uint64) -> None:
    """Empty a slot and move back those behind it that a search would no longer reach."""
    mask = np.uint64(len(slots) // 2 - 1)
    place = (gap + _ONE) & mask
    while slots[_TWO * place + _ONE] != 0:
        home = hash_of(slots[_TWO * place]) & mask
        if ((place - home) & mask) >= ((place - gap) & mask):
            slots[_TWO * gap] = slots[_TWO * place]
            slots[_TWO * gap + _ONE] = slots[_TWO * place + _ONE]
            gap = place
        place = (place + _ONE) & mask
    slots[_TWO * gap + _ONE] = 0
