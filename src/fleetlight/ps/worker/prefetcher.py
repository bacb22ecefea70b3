# SPDX-License-Identifier: Apache-2.0
"""`Prefetcher`: rows of the batch to come, pulled while the one in hand is trained on.

In sync mode nothing changes by it: the servers keep the ids until the worker's next push, whose
answer brings the rows that the step has changed. Its answer and that of the pull may arrive in
either order, so what has changed is put into the rows when they are read, and only then.

Rows pulled ahead are never inserted, since a batch may be announced and not trained on; their first
push inserts them. Tables with an entry count what is seen in training: they are not pulled ahead.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels import Deduped, dedup
from fleetlight.kernels.ids.dedup import collect
from fleetlight.ps.update import Floats, Ids
from fleetlight.ps.worker.client import Client, ReplyValues, Wanted
from fleetlight.ps.worker.connections import PREFETCH

#: what a push says of rows pulled ahead: server, batch, table, positions, rows
Changed = tuple[int, int, int, NDArray[Any], NDArray[Any]]
#: reads rows of distinct ids from the servers
Fetch = Callable[[Deduped], Floats]


@dataclasses.dataclass
class _Found:
    """The rows of one table for one batch."""

    #: as they were announced
    announced: Ids
    distinct: Deduped
    rows: Floats


@dataclasses.dataclass
class _Batch:
    """A batch that was announced."""

    number: int
    pulled: Future[tuple[dict[int, _Found], ReplyValues]]
    #: by table that may be read: what a push has changed since
    changed: dict[int, list[Changed]]
    #: tables of which the servers have dropped the list of ids
    pushed: set[int] = dataclasses.field(default_factory=set)

    def found(self, table: int) -> _Found:
        """The rows, which have come, as they are now."""
        found = self.pulled.result()[0][table]
        for server, _, _, positions, rows in self.changed[table]:
            if not found.rows.flags.writeable:
                found.rows = found.rows.copy()
            found.rows[positions + found.distinct.starts[server]] = rows
        self.changed[table].clear()
        return found


class Prefetcher:
    """Read by any thread that calls the model; pulls go by a thread and a lane of their own."""

    def __init__(self, client: Client, note: Callable[[ReplyValues], None] | None = None) -> None:
        self._client = client
        #: told how old the rows are that are read, where that is not made good
        self._note = note
        self._thread = ThreadPoolExecutor(1, "fleet-ahead")
        #: never held while anything is waited for
        self._lock = threading.Lock()
        self._numbers = 0
        #: of the batch that is trained on, and of the one after it
        self._now: _Batch | None = None
        self._next: _Batch | None = None
        self._read = 0
        self._missed = 0
        self._waited_s = 0.0

    def announce(self, ids: Mapping[int, Ids], *, at_least: int, phase: int, step: int) -> None:
        """The batch announced before is trained on now; these are the ids of the one after it."""
        with self._lock:
            self._now, self._next = self._next, None
        tables = self._client.plan.tables
        # the batch is the user's, who may change it once it is handed out
        wanted = {n: its.copy() for n, its in ids.items() if len(its) and tables[n].entry is None}
        if not wanted:
            return
        self._numbers += 1
        number = self._numbers

        def pull() -> tuple[dict[int, _Found], ReplyValues]:
            return self._pull(number, wanted, at_least, phase, step)

        self._next = _Batch(number, self._thread.submit(pull), {n: [] for n in wanted})

    def _pull(
        self, number: int, ids: Mapping[int, Ids], at_least: int, phase: int, step: int
    ) -> tuple[dict[int, _Found], ReplyValues]:
        distinct = [dedup(its, self._client.server_num) for its in ids.values()]
        values = self._client.pull(
            [Wanted(table, d, insert=False) for table, d in zip(ids, distinct, strict=True)],
            at_least=at_least,
            phase=phase,
            step=step,
            batch=number,
            lane=PREFETCH,
        )
        found = map(_Found, ids.values(), distinct, values.rows)
        return dict(zip(ids, found, strict=True)), values

    def whole(self, table: int, ids: Ids, at_least: int) -> tuple[Deduped, Floats] | None:
        """The distinct ids and their rows, where just these ids were announced."""
        found = self._found(table, at_least)
        if found is None or not np.array_equal(found.announced, ids):
            return None
        self._read += len(found.rows)
        return found.distinct, found.rows

    def read(self, table: int, wanted: Deduped, fetch: Fetch, at_least: int) -> Floats:
        """Rows of distinct ids; those that were not pulled ahead are fetched."""
        found = self._found(table, at_least)
        if found is None:
            self._missed += len(wanted.ids)
            return fetch(wanted)
        places = _places(wanted.ids, found.distinct.ids)
        here = places >= 0
        self._read += int(here.sum())
        if here.all():
            return found.rows[places]
        self._missed += int((~here).sum())
        rows = np.empty((len(places), found.rows.shape[1]), np.float32)
        rows[here] = found.rows[places[here]]
        rows[~here] = fetch(part_of(wanted, ~here))
        return rows

    def _found(self, table: int, at_least: int) -> _Found | None:
        batch = self._now
        if batch is None or table not in batch.changed:
            return None
        began = time.monotonic()
        # the connection watches the deadline
        values = batch.pulled.result()[1]
        self._waited_s += time.monotonic() - began
        if values.slowest < at_least or values.lives != self._client.lives():
            # a server that was started again has forgotten which rows were pulled ahead, and its
            # answers to pushes say nothing of them
            return None
        if self._note is not None:
            self._note(values)
        with self._lock:
            # a step of another thread may have made them old meanwhile
            return batch.found(table) if table in batch.changed else None

    def pushed(self, optimizer: int, changed: Sequence[Changed] = ()) -> None:
        """A step was made: the rows in hand are old, those to come are made good once."""
        mine = {n for n, t in enumerate(self._client.plan.tables) if t.optimizer == optimizer}
        with self._lock:
            self._pushed(mine, changed)

    def _pushed(self, mine: set[int], changed: Sequence[Changed]) -> None:
        if self._now is not None:
            _drop(self._now, mine)
        if self._next is None:
            return
        # of what an earlier push had the servers drop, this one's answer says nothing
        _drop(self._next, mine & self._next.pushed)
        self._next.pushed |= mine
        for one in changed:
            _, number, table, _, _ = one
            if number == self._next.number and table in self._next.changed:
                self._next.changed[table].append(one)

    def forget(self) -> None:
        """Rows have changed without a push of this worker, or may have."""
        with self._lock:
            self._now = self._next = None

    def stop(self) -> None:
        """End the thread; the pull under way ends in time by its deadline."""
        self.forget()
        self._thread.shutdown(cancel_futures=True)

    def figures(self) -> dict[str, float]:
        """What was counted, once anything was announced."""
        if not self._numbers:
            return {}
        return {
            "rows ahead": float(self._read),
            "rows not ahead": float(self._missed),
            "waited for rows ahead s": self._waited_s,
        }


def part_of(wanted: Deduped, chosen: NDArray[np.bool_]) -> Deduped:
    """Some of the distinct ids, still grouped by server."""
    before = np.concatenate(([0], np.cumsum(chosen)))
    return Deduped(wanted.ids[chosen], np.empty(0, np.int32), before[wanted.starts])


def _places(ids: Ids, among: Ids) -> NDArray[np.int32]:
    """Where each id is among distinct ids, -1 where it is not."""
    places = collect(np.concatenate((among, ids)))[1][len(among) :]
    places[places >= len(among)] = -1
    return places


def _drop(batch: _Batch, tables: set[int]) -> None:
    for table in tables:
        batch.changed.pop(table, None)
