# SPDX-License-Identifier: Apache-2.0
"""`Prefetcher`: pulls rows of the next batch while the current batch trains.

For servers on other hosts, where the bytes of rows take longer than a message. In sync mode the
results do not change: the reply to the worker's next push has the prefetched rows that the step
changed. This reply and that of the pull may arrive in either order, so a read applies the changed
rows.

A prefetch inserts no rows, since an announced batch may not be trained on; the first push inserts
them. Tables with an entry count ids in training and are not prefetched, nor are those with a cache.
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
from fleetlight.ps.update import Floats, Ids
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.connections import PREFETCH
from fleetlight.ps.worker.joint_reads import Read
from fleetlight.ps.worker.lookahead.lookahead import rows_among
from fleetlight.ps.worker.reply_values import Ahead, ReplyValues, Wanted

#: prefetched rows that a push changed: server, batch, table, positions, rows
Changed = tuple[int, int, int, NDArray[Any], NDArray[Any]]


@dataclasses.dataclass
class _Found:
    """The rows of one table for one batch."""

    #: the announced ids
    announced: Ids
    distinct: Deduped
    rows: Floats


#: by table what was found, the reply, and the incarnation of each server
_Pulled = tuple[dict[int, _Found], ReplyValues, list[int]]


@dataclasses.dataclass
class _Batch:
    """An announced batch."""

    number: int
    pulled: Future[_Pulled]
    #: by readable table: the rows that pushes changed since
    changed: dict[int, list[Changed]]
    #: tables whose id lists the servers have dropped
    pushed: set[int] = dataclasses.field(default_factory=set)

    def found(self, table: int) -> _Found:
        """The current rows of a completed prefetch."""
        found = self.pulled.result()[0][table]
        for server, _, _, positions, rows in self.changed[table]:
            if not found.rows.flags.writeable:
                found.rows = found.rows.copy()
            found.rows[positions + found.distinct.starts[server]] = rows
        self.changed[table].clear()
        return found


class Prefetcher:
    """Any thread may read rows; pulls use a thread and a lane of their own."""

    def __init__(self, client: Client, note: Callable[[ReplyValues], None] | None = None) -> None:
        self._client = client
        #: called with the versions of rows that later pushes do not correct
        self._note = note
        self._thread = ThreadPoolExecutor(1, "fleet-prefetch")
        #: never held during a wait
        self._lock = threading.Lock()
        self._numbers = 0
        #: the current batch and the next one
        self._now: _Batch | None = None
        self._next: _Batch | None = None
        self._read = 0
        self._missed = 0
        self._waited_s = 0.0

    def announce(
        self, coming: Sequence[Mapping[int, Ids]], *, at_least: int, phase: int, step: int
    ) -> None:
        """Start to prefetch the next batch; the one announced before becomes the current one."""
        ids = coming[0] if coming else {}
        with self._lock:
            self._now, self._next = self._next, None
        tables = self._client.plan.tables
        # the user may change the batch once it is returned
        wanted = {n: its.copy() for n, its in ids.items() if len(its) and tables[n].is_read_ahead}
        if not wanted:
            return
        self._numbers += 1
        number = self._numbers

        def pull() -> _Pulled:
            return self._pull(number, wanted, at_least, phase, step)

        self._next = _Batch(number, self._thread.submit(pull), {n: [] for n in wanted})

    def _pull(
        self, number: int, ids: Mapping[int, Ids], at_least: int, phase: int, step: int
    ) -> _Pulled:
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
        return dict(zip(ids, found, strict=True)), values, self._client.incarnations(PREFETCH)

    def whole(self, table: int, ids: Ids, at_least: int) -> tuple[Deduped, Floats] | None:
        """The distinct ids and their rows, if exactly these ids were announced."""
        found = self._found(table, at_least)
        if found is None or not np.array_equal(found.announced, ids):
            return None
        self._read += len(found.rows)
        return found.distinct, found.rows

    def read(self, table: int, wanted: Deduped, at_least: int) -> Read:
        """Rows of distinct ids; rows that were not prefetched are fetched now."""
        found = self._found(table, at_least)
        if found is None:
            self._missed += len(wanted.ids)
            return (yield wanted)
        rows, missed = yield from rows_among(found.distinct, found.rows, wanted)
        self._read += len(rows) - missed
        self._missed += missed
        return rows

    def _found(self, table: int, at_least: int) -> _Found | None:
        batch = self._now
        if batch is None or table not in batch.changed:
            return None
        began = time.monotonic()
        # the connection watches the deadline
        _, values, incarnations = batch.pulled.result()
        self._waited_s += time.monotonic() - began
        if values.slowest < at_least or incarnations != self._client.incarnations():
            # a restarted server has lost the prefetch lists, so its replies to pushes do not
            # contain changed rows
            return None
        if self._note is not None:
            self._note(values)
        with self._lock:
            # a step of another thread may have outdated them
            return batch.found(table) if table in batch.changed else None

    def wanted(self, optimizer: int) -> list[Ahead]:
        """Nothing: pulls have a lane of their own."""
        return []

    def pushed(self, optimizer: int, values: ReplyValues | None = None) -> None:
        """Invalidate the rows of the current batch; correct those of the next one once."""
        changed = [] if values is None else values.changed
        mine = {n for n, t in enumerate(self._client.plan.tables) if t.optimizer == optimizer}
        with self._lock:
            self._pushed(mine, changed)

    def _pushed(self, mine: set[int], changed: Sequence[Changed]) -> None:
        if self._now is not None:
            _drop(self._now, mine)
        if self._next is None:
            return
        # the reply does not cover tables whose lists an earlier push dropped
        _drop(self._next, mine & self._next.pushed)
        self._next.pushed |= mine
        for one in changed:
            _, number, table, _, _ = one
            if number == self._next.number and table in self._next.changed:
                self._next.changed[table].append(one)

    def forget(self) -> None:
        """Drop prefetched rows: they may have changed without a push of this worker."""
        with self._lock:
            self._now = self._next = None

    def stop(self) -> None:
        """Stop the thread; the deadline bounds a pull in progress."""
        self.forget()
        self._thread.shutdown(cancel_futures=True)

    def metrics(self) -> dict[str, float]:
        """Counters, if any batch was announced."""
        if not self._numbers:
            return {}
        return {
            "rows_read_ahead": float(self._read),
            "rows_on_demand": float(self._missed),
            "read_ahead_wait_seconds": self._waited_s,
        }


def _drop(batch: _Batch, tables: set[int]) -> None:
    for table in tables:
        batch.changed.pop(table, None)
