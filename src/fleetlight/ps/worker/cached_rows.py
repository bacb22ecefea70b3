# SPDX-License-Identifier: Apache-2.0
"""`CachedRows`: lookups that pull only the rows which a device does not have.

In sync mode a row on the device is the servers' row: a push outdates its own rows, and its reply
has the ids that other workers changed, if the worker has any other rows. With `staleness`, a row
includes enough steps of every worker, as a pulled one does. A cached table is not read ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from fleetlight.kernels import Deduped, dedup
from fleetlight.ps.layers.caching.device_cache import CacheLookup, DeviceCache
from fleetlight.ps.layers.handle import Asked
from fleetlight.ps.update import Floats, Ids, Update
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.joint_reads import Read, read_together
from fleetlight.ps.worker.lookahead.lookahead import part_of
from fleetlight.ps.worker.reply_values import ReplyValues, Wanted

_NO_IDS: Ids = np.empty(0, np.int64)


class Puller(Protocol):
    """Reads rows from servers; a communicator."""

    client: Client
    #: called with the ids of a lookup
    reached: Callable[[int, Ids], None] | None

    def at_least(self) -> int:
        """The number of steps of every worker that values read now must include."""

    def read_ahead(self, asked: Asked) -> tuple[Deduped, Floats] | None:
        """The rows of a table whose ids are exactly those announced."""

    def read(self, wanted: Wanted) -> Read:
        """Read rows of one table: those read ahead, and those that are fetched now."""

    def pull_now(self, wanted: Sequence[Wanted]) -> ReplyValues:
        """The reply to a pull of rows."""

    def note(self, values: ReplyValues) -> None:
        """Record the versions of values in use."""


class CachedRows:
    """The rows of a job with caches; `caches` has those of some tables, by number."""

    def __init__(self, puller: Puller, caches: Mapping[int, DeviceCache]) -> None:
        self._puller, self._caches = puller, caches
        self._client = puller.client
        self._incarnations = puller.client.incarnations()

    @property
    def reached(self) -> Callable[[int, Ids], None] | None:
        """Called with the ids of a lookup, including padding."""
        return self._puller.reached

    def look_up(self, asked: Sequence[Asked]) -> list[tuple[Deduped, Floats | Tensor]]:
        """The distinct ids and rows of each table, with one request to each server."""
        self._forget_lost_rows()
        found: dict[int, tuple[Deduped, Floats | Tensor]] = {}
        begun: dict[int, CacheLookup] = {}
        wanted: dict[int, Wanted] = {}
        for place, one in enumerate(asked):
            known = self._puller.read_ahead(one)
            if known is not None:
                found[place] = known
                continue
            distinct = dedup(one.ids, self._client.server_num)
            cache = self._caches.get(one.table)
            if cache is not None:
                begun[place] = cache.begin(distinct, self._puller.at_least())
                distinct = part_of(distinct, begun[place].missing)
            wanted[place] = Wanted(one.table, distinct, one.insert)
        rows, values = self._pulled(wanted)
        for place, arrived in rows.items():
            if place in begun:
                one, lookup = asked[place], begun[place]
                tensor = self._caches[one.table].finish(
                    lookup, arrived, values.slowest, values.versions
                )
                found[place] = lookup.wanted, tensor
            else:
                found[place] = wanted[place].ids, arrived
        self._note(asked, begun)
        return [found[place] for place in range(len(asked))]

    def _pulled(self, wanted: Mapping[int, Wanted]) -> tuple[dict[int, Floats], ReplyValues]:
        """The rows of each request, and the reply that brought those of cached tables."""
        tables = self._client.plan.tables
        rows = {
            place: np.empty((0, tables[one.table].dim), np.float32) for place, one in wanted.items()
        }
        lacking = {place: one for place, one in wanted.items() if len(one.ids.ids)}
        values = ReplyValues()

        def fetch(missing: Sequence[Wanted]) -> Sequence[Floats]:
            nonlocal values
            values = self._puller.pull_now(missing)
            return values.rows

        arrived = read_together(list(lacking.values()), self._puller.read, fetch)
        return {**rows, **dict(zip(lacking, arrived, strict=True))}, values

    def _note(self, asked: Sequence[Asked], begun: Mapping[int, CacheLookup]) -> None:
        """Record the versions of the oldest rows that receive gradients, where rows are stale."""
        if not self._client.plan.pushes_alone:
            return
        versions: dict[int, int] = {}
        for place, lookup in begun.items():
            for server, version in lookup.versions.items() if asked[place].insert else ():
                versions[server] = min(version, versions.get(server, version))
        self._puller.note(ReplyValues(versions=versions))

    def reports(self, update: Update) -> list[int]:
        """The tables with rows here that an update does not change itself."""
        return [number for number, cache, own in self._stepped_by(update) if cache.has_others(own)]

    def stepped(self, update: Update, values: ReplyValues) -> None:
        """A step of all workers in sync mode: its rows are outdated."""
        for number, cache, own in self._stepped_by(update):
            others = values.outdated.get(number, [])
            if len(others) == self._client.server_num:
                cache.outdate([own, *others])
            else:
                # no row but those of the update was here, or a restarted server does not know
                cache.outdate_all()

    def _stepped_by(self, update: Update) -> Iterator[tuple[int, DeviceCache, Ids]]:
        """The cached tables of an update's optimizer, and the ids that it changes."""
        for number, cache in self._caches.items():
            if self._client.plan.tables[number].optimizer == update.optimizer:
                own = update.tables.get(number)
                yield number, cache, _NO_IDS if own is None else own.ids

    def forget(self, *, until_next: bool = False) -> None:
        """Drop all rows; with `until_next`, keep none until the next call."""
        for cache in self._caches.values():
            cache.outdate_all()
            cache.pause(until_next)

    def _forget_lost_rows(self) -> None:
        """Drop all rows if a server has restarted: it may have older ones."""
        incarnations = self._client.incarnations()
        if incarnations != self._incarnations:
            self._incarnations = incarnations
            for cache in self._caches.values():
                cache.outdate_all()

    def metrics(self) -> dict[str, float]:
        """Counters of this worker."""
        caches = self._caches.values()
        return {
            "cached_rows_found": float(sum(cache.found for cache in caches)),
            "cached_rows_copied": float(sum(cache.pulled for cache in caches)),
        }
