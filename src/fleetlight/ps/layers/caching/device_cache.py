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

from fleetlight.kernels import Deduped
from fleetlight.ps.layers.caching.row_slots import RowSlots, Slots
from fleetlight.ps.layers.staging import staging_of
from fleetlight.ps.update import Floats, Ids


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
