# SPDX-License-Identifier: Apache-2.0
"""`PrefetchedIds`: ids that workers prefetched, until their next step is applied. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from fleetlight.ps.update import Ids

#: a worker that pulls ahead and never pushes does not fill the memory
_LISTS = 8


@dataclasses.dataclass(frozen=True)
class PrefetchedBatch:
    """Ids of one table, under the number that the worker gave to them."""

    table: int
    batch: int
    ids: Ids


class PrefetchedIds:
    """What each worker has read for a step to come."""

    def __init__(self) -> None:
        self._lists: dict[int, list[PrefetchedBatch]] = {}

    def remember(self, worker: int, pulled: PrefetchedBatch) -> None:
        """A list under the same number replaces the one before."""
        key = pulled.table, pulled.batch
        kept = [old for old in self._lists.get(worker, []) if (old.table, old.batch) != key]
        others = [old for old in kept if old.table != pulled.table]
        same = [old for old in kept if old.table == pulled.table][1 - _LISTS :]
        self._lists[worker] = [*others, *same, pulled]

    def take(self, worker: int, tables: Collection[int]) -> list[PrefetchedBatch]:
        """The worker's lists of these tables, which are forgotten."""
        lists = self._lists.get(worker, [])
        self._lists[worker] = [kept for kept in lists if kept.table not in tables]
        return [taken for taken in lists if taken.table in tables]

    def forget(self, worker: int) -> None:
        """All lists of a worker."""
        self._lists.pop(worker, None)

    def clear(self) -> None:
        """Forget all."""
        self._lists.clear()
