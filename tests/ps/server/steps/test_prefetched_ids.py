# SPDX-License-Identifier: Apache-2.0
"""PrefetchedIds: kept until the worker's next step of the table's optimizer."""

from __future__ import annotations

import numpy as np

from fleetlight.ps.server.steps.prefetched_ids import PrefetchedBatch, PrefetchedIds


def pulled(table: int, batch: int) -> PrefetchedBatch:
    return PrefetchedBatch(table, batch, np.arange(batch, dtype=np.int64))


def test_lists_are_taken_once_and_by_table() -> None:
    lists = PrefetchedIds()
    for table, batch in [(0, 1), (1, 1), (0, 2)]:
        lists.remember(0, pulled(table, batch))
    lists.remember(1, pulled(0, 9))
    assert [(t.table, t.batch) for t in lists.take(0, {0})] == [(0, 1), (0, 2)]
    assert lists.take(0, {0}) == []
    assert [(t.table, t.batch) for t in lists.take(0, {0, 1})] == [(1, 1)]
    assert [t.batch for t in lists.take(1, {0})] == [9]


def test_a_batch_of_the_same_number_replaces_the_first() -> None:
    lists = PrefetchedIds()
    first, second = pulled(0, 1), PrefetchedBatch(0, 1, np.array([7], np.int64))
    lists.remember(0, first)
    lists.remember(0, second)
    assert lists.take(0, {0}) == [second]


def test_prefetched_ids_of_a_worker_that_never_pushes_are_bounded() -> None:
    lists = PrefetchedIds()
    for batch in range(100):
        lists.remember(0, pulled(0, batch))
        lists.remember(0, pulled(1, batch))
    assert [t.batch for t in lists.take(0, {0})] == list(range(92, 100))
