# SPDX-License-Identifier: Apache-2.0
"""`PullInPush`: the reply to a push has the rows of a later batch, so a step is one round trip.

For servers on this host, where a message costs more than the bytes in it. In sync mode the reply
has the rows after the step; in async mode a worker trains on while its push is in flight, and the
rows are those of the batch after the next.

Announced ids insert no rows, since the batch may not be trained on; its push inserts them. Tables
with an entry count ids in training and are not announced, nor are those with a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fleetlight.kernels import Deduped, dedup
from fleetlight.ps.update import Floats, Ids
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.joint_reads import Read
from fleetlight.ps.worker.lookahead.expected_rows import ExpectedRows
from fleetlight.ps.worker.lookahead.lookahead import rows_among
from fleetlight.ps.worker.reply_values import Ahead, ReplyValues, Wanted

#: rows, and the reply that brought them
_Rows = tuple[Floats, ReplyValues]


class _ComingBatch:
    """An announced batch: the ids of each table, and the rows that have arrived."""

    def __init__(self, announced: Mapping[int, Ids], ids: Mapping[int, Ids], servers: int) -> None:
        #: the announcement itself, which tells batches apart
        self.announced = announced
        self.ids, self._servers = ids, servers
        self._distinct: dict[int, Deduped] = {}
        self.rows: dict[int, _Rows] = {}
        #: tables whose rows are in flight
        self.requested: set[int] = set()

    def distinct(self, table: int) -> Deduped:
        """The distinct ids of a table."""
        found = self._distinct.get(table)
        if found is None:
            found = self._distinct[table] = dedup(self.ids[table], self._servers)
        return found

    def drop(self, tables: set[int]) -> None:
        """Drop the rows of these tables."""
        for table in tables:
            self.rows.pop(table, None)
            self.requested.discard(table)

    def ahead(self, table: int) -> Ahead:
        """The request of a table's rows in the next push."""
        self.requested.add(table)

        def arrived(rows: Floats, values: ReplyValues) -> None:
            self.rows[table] = rows, values

        return Ahead(Wanted(table, self.distinct(table), insert=False), arrived)


class PullInPush:
    """Any thread may read rows; the training thread announces and pushes."""

    def __init__(
        self,
        client: Client,
        *,
        renews: bool,
        note: Callable[[ReplyValues], None] | None = None,
    ) -> None:
        self._client = client
        #: True if each push renews the rows of the next batch, as in sync mode
        self._renews = renews
        #: called with the reply whose rows are used
        self._note = note
        self._expected = ExpectedRows(client)
        tables = client.plan.tables
        #: by optimizer: its tables
        self._tables = [
            {n for n, table in enumerate(tables) if table.optimizer == number}
            for number in range(len(client.plan.optimizers))
        ]
        #: the current batch, and those after it
        self._now = _ComingBatch({}, {}, client.server_num)
        self._coming: list[_ComingBatch] = []
        self._phase = self._step = 0
        self._has_announced = False
        self._read = 0
        self._missed = 0

    def announce(
        self, coming: Sequence[Mapping[int, Ids]], *, at_least: int, phase: int, step: int
    ) -> None:
        """Announce the batches after the one handed out now; its rows are requested by pushes."""
        self._phase, self._step = phase, step
        known = {id(batch.announced): batch for batch in self._coming}
        self._now = self._coming[0] if self._coming else _ComingBatch({}, {}, 0)
        self._coming = [known.get(id(ids)) or self._batch(ids) for ids in coming]

    def _batch(self, announced: Mapping[int, Ids]) -> _ComingBatch:
        tables = self._client.plan.tables
        # the user may change the batch once it is handed out
        ids = {
            n: its.copy() for n, its in announced.items() if len(its) and tables[n].is_read_ahead
        }
        self._has_announced |= bool(ids)
        batch = _ComingBatch(announced, ids, self._client.server_num)
        if stored := self._expected.tables_in_files(ids):
            self._expected.expect({n: batch.distinct(n) for n in stored})
        return batch

    def wanted(self, optimizer: int) -> list[Ahead]:
        """The rows of coming batches that the next push of an optimizer requests."""
        coming = self._coming[:1] if self._renews else self._coming
        if self._renews:
            for batch in coming:
                batch.drop(self._tables[optimizer])
        return [
            batch.ahead(table)
            for batch in coming
            for table in batch.ids
            if table in self._tables[optimizer] and table not in batch.requested
        ]

    def pushed(self, optimizer: int, values: ReplyValues | None = None) -> None:
        """Drop the rows of the current batch, which its push has outdated."""
        self._now.drop(self._tables[optimizer])

    def whole(self, table: int, ids: Ids, at_least: int) -> tuple[Deduped, Floats] | None:
        """The distinct ids and their rows, if exactly these ids were announced.

        The first lookup of a batch without rows pulls those of all its tables.
        """
        batch = self._now
        announced = batch.ids.get(table)
        if announced is None or not np.array_equal(announced, ids):
            return None
        rows = self._recent(batch, table, at_least)
        if rows is None:
            rows = self._pulled(batch, table, at_least)
        else:
            self._read += len(rows)
        return batch.distinct(table), rows

    def read(self, table: int, wanted: Deduped, at_least: int) -> Read:
        """Rows of distinct ids; rows that have not arrived are fetched now."""
        batch = self._now
        rows = self._recent(batch, table, at_least)
        if rows is None:
            self._missed += len(wanted.ids)
            return (yield wanted)
        found, missed = yield from rows_among(batch.distinct(table), rows, wanted)
        self._read += len(found) - missed
        self._missed += missed
        return found

    def _recent(self, batch: _ComingBatch, table: int, at_least: int) -> Floats | None:
        """The rows that have arrived, if they include `at_least` steps of every worker."""
        arrived = batch.rows.get(table)
        if arrived is None or arrived[1].slowest < at_least:
            return None
        if self._note is not None:
            self._note(arrived[1])
        return arrived[0]

    def _pulled(self, batch: _ComingBatch, table: int, at_least: int) -> Floats:
        """Pull the rows of all tables of a batch, and return those of one table."""
        tables = [n for n in batch.ids if n == table or self._recent(batch, n, at_least) is None]
        values = self._client.pull(
            [Wanted(n, batch.distinct(n), insert=False) for n in tables],
            at_least=at_least,
            phase=self._phase,
            step=self._step,
        )
        for number, rows in zip(tables, values.rows, strict=True):
            batch.rows[number] = rows, values
            self._missed += len(rows)
        if self._note is not None:
            self._note(values)
        return batch.rows[table][0]

    def forget(self) -> None:
        """Drop all rows: they may have changed without a push of this worker."""
        for batch in (self._now, *self._coming):
            batch.drop(set(batch.ids))

    def stop(self) -> None:
        """Forget all batches."""
        self._coming, self._now = [], _ComingBatch({}, {}, 0)

    def metrics(self) -> dict[str, float]:
        """Counters, if any batch was announced."""
        if not self._has_announced:
            return {}
        return {
            "rows_read_ahead": float(self._read),
            "rows_on_demand": float(self._missed),
        }
