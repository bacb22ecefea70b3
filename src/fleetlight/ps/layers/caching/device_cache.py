# SPDX-License-Identifier: Apache-2.0
"""`DeviceCache`: rows of one table that stay on the device of its layers between lookups.

A lookup gathers the rows that are there, and copies only those that a server has sent for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.kernels import Deduped, RowTable
from fleetlight.ps.layers.staging import staging_of
from fleetlight.ps.update import Floats, Ids

Slots = NDArray[np.int64]
#: steps of the slowest worker that a row includes, if the row may not be used
_OUTDATED = -1
#: the share of the slots that one eviction frees: each reads the last use of all rows
_EVICTED = 8


class RowSlots:
    """At most `capacity` ids. Rows that were not used for the longest time leave first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # only the index of this table is used
        self._index = RowTable(1, "sgd")
        #: by slot: how many steps of the slowest worker the row includes
        self._steps = np.full(capacity, _OUTDATED, np.int64)
        #: by slot: the version of the server's values when it sent the row
        self._versions = np.zeros(capacity, np.int64)
        #: by slot: the number of the last lookup that used it
        self._used = np.zeros(capacity, np.int64)
        self._lookups = 0

    def __len__(self) -> int:
        return len(self._index)

    def find(self, ids: Ids, at_least: int) -> Slots:
        """The slot of each distinct id; -1 without a row that includes `at_least` steps."""
        self._lookups += 1
        slots = self._index.find(ids)
        usable = slots >= 0
        usable[usable] = self._steps[slots[usable]] >= at_least
        self._used[slots[usable]] = self._lookups
        return np.where(usable, slots, np.int64(-1))

    def put(self, ids: Ids, steps: int, versions: NDArray[np.int64]) -> Slots:
        """Slots for rows that have arrived; -1 without room."""
        slots = self._index.find(ids)
        self._used[slots[slots >= 0]] = self._lookups
        new = np.flatnonzero(slots < 0)
        new = new[: self._room(len(new))]
        slots[new] = self._index.insert(ids[new])
        has_slot = slots >= 0
        mine = slots[has_slot]
        self._steps[mine], self._used[mine] = steps, self._lookups
        self._versions[mine] = versions[has_slot]
        return slots

    def version(self, slots: Slots) -> int | None:
        """The version of the oldest row in these slots; None without a row."""
        mine = slots[slots >= 0]
        return int(self._versions[mine].min()) if len(mine) else None

    def has_others(self, ids: Ids) -> bool:
        """True if there are usable rows of other ids than these distinct ones."""
        slots = self._index.find(ids)
        mine = self._steps[slots[slots >= 0]]
        return int(np.count_nonzero(self._steps >= 0)) > int(np.count_nonzero(mine >= 0))

    def outdate(self, ids: Ids) -> None:
        """These rows have changed."""
        slots = self._index.find(ids)
        self._steps[slots[slots >= 0]] = _OUTDATED

    def outdate_all(self) -> None:
        """All rows may have changed."""
        self._steps.fill(_OUTDATED)

    def _room(self, count: int) -> int:
        """How many of `count` new ids have room."""
        free = self.capacity - len(self)
        if free < count:
            self._evict(count - free)
        return min(count, self.capacity - len(self))

    def _evict(self, count: int) -> None:
        """Free slots, but none of the last lookup: a batch above the capacity keeps its rows."""
        slots = self._index.numbers.astype(np.int64)
        idle = slots[self._used[slots] < self._lookups]
        count = min(len(idle), max(count, self.capacity // _EVICTED))
        if 0 < count < len(idle):
            idle = idle[np.argpartition(self._used[idle], count - 1)[:count]]
        if count:
            self._index.remove(idle)
            self._steps[idle] = _OUTDATED


@dataclasses.dataclass(frozen=True)
class CacheLookup:
    """The distinct ids of a lookup, and the rows of those that the cache has."""

    wanted: Deduped
    #: a mask of the distinct ids whose rows must be pulled
    missing: NDArray[np.bool_]
    #: the other rows, on the device
    here: Tensor
    #: by server: the version of its oldest row among them
    versions: Mapping[int, int]
    #: the number of changes of the cache before this lookup
    changes: int


class DeviceCache:
    """Any thread may look up rows; the training thread tells which rows have changed."""

    def __init__(self, dim: int, capacity: int, device: Callable[[], torch.device]) -> None:
        """`device` returns where the layers are now."""
        self._dim, self._device = dim, device
        self._slots = RowSlots(capacity)
        self._lock = threading.Lock()
        #: the rows by slot; None before the first lookup
        self._rows: Tensor | None = None
        #: the stream that used the rows last
        self._stream: object = None
        self._changes = 0
        self._is_paused = False
        #: rows of lookups that were here, and rows that were pulled and copied
        self.found = self.pulled = 0

    def begin(self, wanted: Deduped, at_least: int) -> CacheLookup:
        """Gather the rows that include `at_least` steps of every worker."""
        with self._entered() as rows:
            if self._is_paused:
                slots = np.full(len(wanted.ids), -1, np.int64)
            else:
                slots = self._slots.find(wanted.ids, at_least)
            missing = slots < 0
            found = slots[~missing]
            self.found += len(found)
            self.pulled += len(slots) - len(found)
            here = rows.index_select(0, staging_of(rows.device).to_device(found))
            return CacheLookup(wanted, missing, here, self._versions(wanted, slots), self._changes)

    def _versions(self, wanted: Deduped, slots: Slots) -> dict[int, int]:
        starts = wanted.starts
        found = {
            server: self._slots.version(slots[starts[server] : starts[server + 1]])
            for server in range(len(starts) - 1)
        }
        return {server: version for server, version in found.items() if version is not None}

    def finish(
        self, lookup: CacheLookup, arrived: Floats, steps: int, versions: Mapping[int, int]
    ) -> Tensor:
        """Keep the missing rows, which have arrived; return all rows in the order of the ids.

        They include `steps` steps of the slowest worker, and have the versions of their servers.
        """
        with self._entered() as rows:
            staging = staging_of(rows.device)
            pulled = staging.to_device(arrived)
            # a change since the request may be missing from these rows
            if lookup.changes == self._changes:
                ids, each = _missing_of(lookup, versions)
                slots = self._slots.put(ids, steps, each)
                kept = slots >= 0
                source = pulled
                if not kept.all():
                    source = pulled.index_select(0, staging.to_device(np.flatnonzero(kept)))
                rows.index_copy_(0, staging.to_device(slots[kept]), source.to(rows.device))
            return self._joined(lookup, pulled)

    def _joined(self, lookup: CacheLookup, pulled: Tensor) -> Tensor:
        found = lookup.here.shape[0]
        if not found:
            return pulled
        order = np.empty(len(lookup.missing), np.int32)
        order[~lookup.missing] = np.arange(found)
        order[lookup.missing] = found + np.arange(len(pulled))
        # the layers may have moved to another device since
        both = torch.cat([lookup.here.to(pulled.device), pulled])
        return both.index_select(0, staging_of(pulled.device).to_device(order))

    def has_others(self, ids: Ids) -> bool:
        """True if there are rows of other ids than these."""
        with self._lock:
            return self._slots.has_others(ids)

    def outdate(self, ids: list[Ids]) -> None:
        """These rows have changed on the servers."""
        with self._lock:
            self._changes += 1
            for some in ids:
                self._slots.outdate(some)

    def outdate_all(self) -> None:
        """All rows may have changed."""
        with self._lock:
            self._changes += 1
            self._slots.outdate_all()

    def pause(self, is_paused: bool) -> None:
        """Use no rows during a pause, in which they may change unseen; then `outdate_all`."""
        with self._lock:
            self._is_paused = is_paused

    @contextlib.contextmanager
    def _entered(self) -> Iterator[Tensor]:
        """Lend the rows, on the device of the layers, to one thread and one stream at a time."""
        device = self._device()
        # the cache outlives the modes of one lookup
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._rows is None or self._rows.device != device:
                self._slots.outdate_all()
                shape = (self._slots.capacity, self._dim)
                self._rows = torch.empty(shape, dtype=torch.float32, device=device)
                self._stream = None
            self._stream = staging_of(device).after(self._stream)
            yield self._rows


def _missing_of(lookup: CacheLookup, versions: Mapping[int, int]) -> tuple[Ids, NDArray[np.int64]]:
    """The ids that were pulled, and the version of the server of each."""
    by_server = [versions.get(server, 0) for server in range(len(lookup.wanted.starts) - 1)]
    each = np.repeat(np.array(by_server, np.int64), np.diff(lookup.wanted.starts))
    return lookup.wanted.ids[lookup.missing], each[lookup.missing]
