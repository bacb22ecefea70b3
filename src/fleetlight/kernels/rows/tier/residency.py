# SPDX-License-Identifier: Apache-2.0
"""Where each row of a tiered table is, and which rows leave memory next.

`where` has one number for each row: slot + 1 if the row is in memory, -(position + 1) if it is only
in the file, 0 if there is no such row. Each slot has the number of its row in `owners` (-1: free)
and a count in `uses`. An access adds 1, up to `MAX_USES`. The clock hand subtracts 1 and evicts a
row at 0. The flag `PINNED` excludes the rows of the present call.

In the file, a row follows its number, so that a file with wrong contents is noticed.
"""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Floats, Ids, Int8s, Int32s, Int64s, Positions, Values
from fleetlight.kernels.compiling.kernel import kernel
from fleetlight.kernels.compiling.prefetching import prefetch
from fleetlight.kernels.rows.row_access import ahead, ask

#: the most accesses that are counted, and the flag of a row that must stay
MAX_USES, PINNED = 7, 64
FREE = -1
_AHEAD = 64


@kernel
def find_slots(numbers: Ids, where: Int32s, uses: Int8s, slots: Int64s, missing: Int64s) -> int:
    """Find and pin the slot of each row, -1 if it has none; return how many are `missing`.

    The number -1 has the slot -1 and is not missing.
    """
    count = 0
    for i in range(len(numbers)):
        if i + _AHEAD < len(numbers):
            prefetch(where, np.uint64(max(numbers[i + _AHEAD], 0)))
        slots[i] = -1
        if numbers[i] < 0:
            continue
        place = where[np.uint64(numbers[i])]
        if place <= 0:
            missing[count] = i
            count += 1
            continue
        slot = np.uint64(place - 1)
        slots[i] = place - 1
        used = uses[slot] & (PINNED - 1)
        uses[slot] = min(used + 1, MAX_USES) | PINNED
    return count


@kernel
def unpin(slots: Ids, uses: Int8s) -> None:
    """Let rows leave memory again; the slot -1 is skipped."""
    for i in range(len(slots)):
        if slots[i] >= 0:
            uses[np.uint64(slots[i])] &= PINNED - 1


@kernel
def choose(count: int, owners: Int32s, uses: Int8s, hand: Int64s, chosen: Int64s) -> int:
    """Choose `count` slots whose rows leave memory, and pin them; fewer if others are pinned."""
    found, at = 0, hand[0]
    for _ in range((MAX_USES + 2) * len(owners)):
        if found == count:
            break
        slot = np.uint64(at)
        at += 1
        if at == len(owners):
            at = 0
        if owners[slot] == FREE or uses[slot] & PINNED:
            continue
        if uses[slot] > 0:
            uses[slot] -= 1
            continue
        uses[slot] = PINNED
        chosen[found] = np.int64(slot)
        found += 1
    hand[0] = at
    return found


@kernel
def pack(
    slots: Ids, slab: Floats, width: int, owners: Int32s, records: Floats, numbers: Int32s
) -> None:
    """Copy rows to records [number | row]; `numbers` are the bits of `records`."""
    early = ahead(width)
    for i in range(len(slots)):
        if i + early < len(slots):
            ask(slab, np.uint64(slots[i + early]) * np.uint64(width), width)
        at, to = np.uint64(slots[i]) * np.uint64(width), np.uint64(i) * np.uint64(width + 1)
        numbers[to] = owners[np.uint64(slots[i])]
        for c in range(width):
            records[to + np.uint64(1 + c)] = slab[at + np.uint64(c)]


@kernel
def unpack(
    records: Values,
    found: Positions,
    width: int,
    numbers: Ids,
    places: Ids,
    out: Floats,
    stride: int,
) -> int:
    """Copy each record to its place in `out`, whose rows have `stride` floats.

    `found` are the bits of `records`. Returns the first record that has another number, or -1.
    """
    for i in range(len(numbers)):
        at, to = np.uint64(i) * np.uint64(width + 1), np.uint64(places[i]) * np.uint64(stride)
        if found[at] != numbers[i]:
            return i
        for c in range(width):
            out[to + np.uint64(c)] = records[at + np.uint64(1 + c)]
    return -1


@kernel
def gather(
    numbers: Ids,
    where: Int32s,
    slab: Floats,
    width: int,
    out: Floats,
    stride: int,
    missing: Int64s,
) -> int:
    """Copy the rows in memory to `out`; return how many of the others, in the file, are `missing`.

    Numbers that are -1 or have no row are skipped.
    """
    count, early = 0, ahead(width)
    for i in range(len(numbers)):
        if i + early < len(numbers):
            prefetch(where, np.uint64(max(numbers[i + early], 0)))
        if numbers[i] < 0:
            continue
        place = where[np.uint64(numbers[i])]
        if place < 0:
            missing[count] = i
            count += 1
        elif place > 0:
            at, to = np.uint64(place - 1) * np.uint64(width), np.uint64(i) * np.uint64(stride)
            for c in range(width):
                out[to + np.uint64(c)] = slab[at + np.uint64(c)]
    return count
