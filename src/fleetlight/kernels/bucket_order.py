# SPDX-License-Identifier: Apache-2.0
"""All rows of a table in the order of a checkpoint: by bucket, and by id inside a bucket.

A counting sort over the slots of the index, then a small sort in each bucket: twelve bytes a row
beside the table, and no second copy of it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from fleetlight.kernels.arrays import Ids, Int32s, Int64s
from fleetlight.kernels.compiling import kernel, part
from fleetlight.kernels.hashing import BUCKETS, bucket_of
from fleetlight.kernels.probing import IDS, WORDS

#: up to this length, inserting one by one beats splitting
_SHORT = 24


@dataclasses.dataclass(frozen=True)
class BucketOrder:
    """Rows sorted by (bucket, id); bucket b has those from starts[b] to starts[b + 1]."""

    rows: Int32s  #: row numbers
    ids: Ids
    starts: Int64s


def bucket_order(slots: Int64s, old: Int64s, moved: int, count: int) -> BucketOrder:
    """The order of `count` rows found in an index, and from word `moved` on in an older one."""
    starts = np.zeros(BUCKETS + 2, np.int64)
    parts = (slots, 0), (old, moved)
    for part_of_index, start in parts:
        _count(part_of_index, start, starts)
    np.cumsum(starts, out=starts)
    rows, ids = np.empty(count, np.int32), np.empty(count, np.int64)
    for part_of_index, start in parts:
        _place(part_of_index, start, starts, rows, ids)
    # placing has moved each bucket's start to where the next one begins
    _sort_buckets(starts, rows, ids)
    return BucketOrder(rows, ids, starts[:-1])


@kernel
def _count(slots: Int64s, start: int, starts: Int64s) -> None:
    """Count the ids of bucket b at b + 2."""
    for line in range(start, len(slots), WORDS):
        for at in range(line, line + IDS):
            if slots[np.uint64(at + IDS)] > 0:
                starts[np.uint64(bucket_of(slots[np.uint64(at)]) + 2)] += 1


@kernel
def _place(slots: Int64s, start: int, starts: Int64s, rows: Int32s, ids: Int64s) -> None:
    """Put each row where its bucket, which begins at starts[b + 1], has its next place."""
    for line in range(start, len(slots), WORDS):
        for at in range(line, line + IDS):
            one, row = slots[np.uint64(at)], slots[np.uint64(at + IDS)]
            if row > 0:
                bucket = np.uint64(bucket_of(one) + 1)
                to = np.uint64(starts[bucket])
                rows[to], ids[to] = row - 1, one
                starts[bucket] += 1


@kernel
def _sort_buckets(starts: Int64s, rows: Int32s, ids: Int64s) -> None:
    pending = np.empty(128, np.int64)
    for bucket in range(len(starts) - 2):
        _sort(starts[bucket], starts[bucket + 1], ids, rows, pending)


@part
def _sort(start: int, stop: int, ids: Int64s, rows: Int32s, pending: Int64s) -> None:
    """Quicksort; the larger side waits in `pending`, so 64 sides are the most that ever do."""
    depth = 0
    while True:
        while stop - start > _SHORT:
            middle = _split(start, stop, ids, rows)
            if middle - start > stop - middle:
                pending[depth], pending[depth + 1] = start, middle
                start = middle
            else:
                pending[depth], pending[depth + 1] = middle, stop
                stop = middle
            depth += 2
        _insert(start, stop, ids, rows)
        if depth == 0:
            return
        depth -= 2
        start, stop = pending[depth], pending[depth + 1]


@part
def _split(start: int, stop: int, ids: Int64s, rows: Int32s) -> int:
    """Move smaller ids before larger ones; where the larger begin, never at either end."""
    first, middle, last = ids[start], ids[(start + stop) // 2], ids[stop - 1]
    pivot = max(min(first, middle), min(max(first, middle), last))
    left, right = start, stop - 1
    while True:
        while ids[left] < pivot:
            left += 1
        while ids[right] > pivot:
            right -= 1
        if left >= right:
            return right + 1 if right + 1 < stop else right
        ids[left], ids[right] = ids[right], ids[left]
        rows[left], rows[right] = rows[right], rows[left]
        left += 1
        right -= 1


@part
def _insert(start: int, stop: int, ids: Int64s, rows: Int32s) -> None:
    for i in range(start + 1, stop):
        one, row, k = ids[i], rows[i], i
        while k > start and ids[k - 1] > one:
            ids[k], rows[k] = ids[k - 1], rows[k - 1]
            k -= 1
        ids[k], rows[k] = one, row
