# SPDX-License-Identifier: Apache-2.0
"""`PrefetchedIds`: ids that workers prefetched, until their next step is applied. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from fleetlight.ps.update import Ids

#: limits the memory of a worker that prefetches and never pushes
_LISTS = 8


@dataclasses.dataclass(frozen=True)
class PrefetchedBatch:
    """Prefetched ids of one table, with the number that the worker gave to the batch."""

    table: int
    batch: int
    ids: Ids


class PrefetchedIds:
    """The prefetched ids of each worker."""

    def __init__(self) -> None:
        self._lists: dict[int, list[PrefetchedBatch]] = {}

    def remember(self, worker: int, pulled: PrefetchedBatch) -> None:
        """Add a batch; it replaces the batch of the same table and number."""
        key = pulled.table, pulled.batch
        kept = [old for old in self._lists.get(worker, []) if (old.table, old.batch) != key]
        others = [old for old in kept if old.table != pulled.table]
        same = [old for old in kept if old.table == pulled.table][1 - _LISTS :]
        self._lists[worker] = [*others, *same, pulled]

    def take(self, worker: int, tables: Collection[int]) -> list[PrefetchedBatch]:
        """Remove and return the worker's batches of these tables."""
        lists = self._lists.get(worker, [])
        self._lists[worker] = [kept for kept in lists if kept.table not in tables]
        return [taken for taken in lists if taken.table in tables]

    def forget(self, worker: int) -> None:
        """Forget the batches of a worker."""
        self._lists.pop(worker, None)

    def clear(self) -> None:
        """Forget the batches of all workers."""
        self._lists.clear()
