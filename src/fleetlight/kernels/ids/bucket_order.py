# SPDX-License-Identifier: Apache-2.0
"""The order of a checkpoint: by bucket, and by id inside a bucket.

Sorting in place avoids a second list of all rows of a table, at twelve bytes for each row. Every
pair is swapped to the next free place of its bucket, then each bucket is sorted.
"""

from __future__ import annotations

import numpy as np

from fleetlight.kernels.arrays import Ids, Int32s, Int64s
from fleetlight.kernels.compiling.kernel import kernel, part
from fleetlight.kernels.ids.hashing import BUCKETS, bucket_of

#: up to this length, insertion sort is faster than quicksort
_SHORT = 24


class BucketCount:
    """The number of ids in each bucket, counted incrementally."""

    def __init__(self) -> None:
        self._counts: Int64s = np.zeros(BUCKETS, np.int64)

    def add(self, ids: Ids) -> None:
        """Count more ids."""
        _count(ids, self._counts)

    @property
    def starts(self) -> Int64s:
        """In bucket order, bucket b has the ids from starts[b] to starts[b + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self._counts)])


def put_in_bucket_order(starts: Int64s, ids: Int64s, rows: Int32s) -> None:
    """Sort ids and their row numbers in place; `starts` has the start of each bucket."""
    _gather_buckets(starts, starts[:-1].copy(), ids, rows)
    _sort_buckets(starts, rows, ids)


@kernel
def _count(ids: Ids, counts: Int64s) -> None:
    for i in range(len(ids)):
        counts[np.uint64(bucket_of(ids[i]))] += 1


@kernel
def _gather_buckets(starts: Int64s, free: Int64s, ids: Int64s, rows: Int32s) -> None:
    """Swap until all ids are in their buckets; in bucket b those before free[b] already are."""
    for bucket in range(len(free)):
        while free[bucket] < starts[bucket + 1]:
            at = np.uint64(free[bucket])
            other = np.uint64(bucket_of(ids[at]))
            to = np.uint64(free[other])
            ids[at], ids[to] = ids[to], ids[at]
            rows[at], rows[to] = rows[to], rows[at]
            free[other] += 1


@kernel
def _sort_buckets(starts: Int64s, rows: Int32s, ids: Int64s) -> None:
    pending = np.empty(128, np.int64)
    for bucket in range(len(starts) - 1):
        _sort(starts[bucket], starts[bucket + 1], ids, rows, pending)


@part
def _sort(start: int, stop: int, ids: Int64s, rows: Int32s, pending: Int64s) -> None:
    """Quicksort; the larger side waits in `pending`, so at most 64 sides wait."""
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
    """Move smaller ids before larger ones; return the start of the larger, never at an end."""
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
