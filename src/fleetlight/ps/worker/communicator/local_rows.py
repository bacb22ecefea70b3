# SPDX-License-Identifier: Apache-2.0
"""`LocalRows`: the rows of a table that a GeoSGD worker trains locally.

Besides weights and state, each row has a copy of the servers' weights and the window of its last
use. A window lasts from one exchange to the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels import Deduped, RowTable, dedup, rule_named
from fleetlight.kernels.rows import copies
from fleetlight.ps.plan import TablePlan
from fleetlight.ps.tables.optimizers import rule_options
from fleetlight.ps.update import Floats, Ids, TableGradients
from fleetlight.ps.wire_forms import as_sent
from fleetlight.ps.worker.joint_reads import Read
from fleetlight.ps.worker.lookahead.lookahead import part_of

Numbers = NDArray[np.int64]
#: A row that was not used for this many windows is pulled again before use. Until then it may miss
#: updates of other workers: few, if they use it as rarely.
KEPT_WINDOWS = 100
#: windows are counted in float32
MAX_WINDOWS = 1 << 23
#: the window of a row that must be pulled again
_EXPIRED = 0
#: number of forwards whose row numbers are cached for the next step
_REMEMBERED = 8


class LocalRows:
    """The training thread changes rows; any thread may read."""

    def __init__(
        self, plan: TablePlan, servers: int, workers: Callable[[], int], limit: int
    ) -> None:
        self.plan = plan
        self._rule = rule_named(plan.rule.name, plan.rule.options)
        self._servers = servers
        self._workers = workers
        self._limit = limit
        #: held while rows are read or change; a thread may read a table twice at once
        self._lock = threading.RLock()
        self._last_hyper: tuple[Any, int, NDArray[np.float64]] = None, 0, np.empty(0)
        self.window = 1
        self.clear()

    def clear(self) -> None:
        """Drop all rows: the servers have newer ones."""
        dim = self.plan.dim
        with self._lock:
            self._rows = RowTable(dim, self._rule, meta_width=dim + 1)
            self._last = self._rows.width - 1
            #: numbers of the rows used in this window, each once
            self._used: list[Numbers] = []
            #: ids that were read, the very arrays, and their numbers
            self._visited: list[tuple[Ids, Numbers]] = []

    def expire(self) -> None:
        """Pull all rows again at their next use; keep the state of the rule."""
        dim = self.plan.dim
        with self._lock:
            rows = self._rows.rows
            # no difference remains to be pushed
            rows[:, self._last - dim : self._last] = rows[:, :dim]
            rows[:, self._last] = _EXPIRED
            self._used.clear()
            self._visited.clear()

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, wanted: Deduped, keep: bool) -> Read:
        """Rows of distinct ids; missing and expired rows are pulled from the servers.

        Without `keep`, ids without a local row get none.
        """
        weights = np.empty((len(wanted.ids), self.plan.dim), np.float32)
        if keep:
            with self._lock:
                return (yield from self._read_to_train(wanted, weights))
        with self._lock:
            numbers = self._rows.find(wanted.ids)
            stale = copies.read(self._rows.rows, numbers, self._oldest, weights)
        if len(stale):
            weights[stale] = yield _part_at(wanted, stale)
        return weights

    @property
    def _oldest(self) -> int:
        """The oldest window of a row that has not expired."""
        return max(1, self.window - KEPT_WINDOWS)

    def _read_to_train(self, wanted: Deduped, weights: Floats) -> Read:
        numbers = self._rows.find(wanted.ids)
        rows = self._rows.rows
        stale, used = copies.visit(rows, numbers, self._oldest, self.window, weights)
        self._used.append(used)
        if len(stale):
            missing = _part_at(wanted, stale)
            arrived = yield missing
            numbers[stale] = mine = self._rows.insert(missing.ids)
            copies.renew(self._rows.rows, mine, arrived)
            self._used.append(copies.mark(self._rows.rows, mine, self.window))
            weights[stale] = self._rows.rows[mine, : self.plan.dim]
        self._remember(wanted.ids, numbers)
        return weights

    def _remember(self, ids: Ids, numbers: Numbers) -> None:
        if len(self._visited) == _REMEMBERED:
            del self._visited[0]
        self._visited.append((ids, numbers))

    def learn(self, part: TableGradients, options: Mapping[str, Any], step: int) -> None:
        """Apply gradients by the rule of the table."""
        hyper = self._hyper(options, step)
        with self._lock:
            numbers, gradients = self._numbers(part.ids), part.gradients
            if len(numbers) and numbers.min() < 0:
                # read so long ago that the row has been pushed and evicted
                here = numbers >= 0
                numbers, gradients = numbers[here], gradients[here]
            self._rows.learn(numbers, gradients, hyper)

    def _hyper(self, options: Mapping[str, Any], step: int) -> NDArray[np.float64]:
        """The hyper-parameters of the rule; equal options are the same object."""
        known, at, hyper = self._last_hyper
        if known is not options or (at != step and self._rule.counts_steps):
            hyper = self._rule.hyper(rule_options(self.plan.rule, options), step + 1)
            self._last_hyper = options, step, hyper
        return hyper

    def _numbers(self, ids: Ids) -> Numbers:
        for visited, numbers in self._visited:
            if visited is ids:
                return numbers
        return self._rows.find(ids)

    def differences(self) -> TableGradients:
        """The differences of this window, divided by the workers; starts the next window.

        It evicts rows beyond the limit, least recently used first.
        """
        with self._lock:
            return self._take(np.concatenate([*self._used, self._surplus()]))

    def rest(self) -> TableGradients:
        """The differences of all rows that were never pushed."""
        with self._lock:
            numbers = self._rows.numbers.astype(np.int64)
            return self._take(numbers[self._rows.rows[numbers, self._last] != _EXPIRED])

    def _take(self, numbers: Numbers) -> TableGradients:
        self._used.clear()
        found = dedup(self._rows.ids_of(numbers), self._servers)
        grouped = np.empty_like(numbers)
        grouped[found.inverse] = numbers
        differences = self._share(grouped)
        self.window += 1
        self._evict(grouped)
        if self.window > MAX_WINDOWS:
            self._count_anew()
        return TableGradients(found.ids, found.starts, differences)

    def _share(self, numbers: Numbers) -> Floats:
        """Count local progress as sent, except for what a narrow form does not carry."""
        dim = self.plan.dim
        share = copies.share(self._rows.rows, numbers, self._workers(), dim)
        sent = as_sent(share, self.plan)
        if sent is not share:
            self._rows.rows[numbers, self._last - dim : self._last] -= share - sent
        return sent

    def _count_anew(self) -> None:
        """Restart the window counter, with all rows used in the first window."""
        last = self._rows.rows[:, self._last]
        last[last != _EXPIRED] = 1
        self.window = 2

    def _surplus(self) -> Numbers:
        """Rows to evict after this push."""
        over = len(self._rows) - self._limit
        if over <= 0:
            return np.empty(0, np.int64)
        numbers = self._rows.numbers
        last = self._rows.rows[numbers, self._last]
        chosen = numbers[np.argpartition(last, over - 1)[:over]]
        # the rows of this window wait for their reply
        chosen = chosen[self._rows.rows[chosen, self._last] < self.window]
        self._rows.rows[chosen, self._last] = -1
        surplus: Numbers = chosen.astype(np.int64)
        return surplus

    def _evict(self, numbers: Numbers) -> None:
        gone = numbers[self._rows.rows[numbers, self._last] < 0]
        if len(gone):
            self._rows.remove(gone)
            # other ids may reuse their numbers
            self._visited.clear()

    def take(self, ids: Ids, arrived: Floats) -> None:
        """Take the servers' rows after an exchange; keep progress made meanwhile."""
        with self._lock:
            copies.renew(self._rows.rows, self._rows.find(ids), arrived)


def _part_at(wanted: Deduped, positions: Numbers) -> Deduped:
    """Select distinct ids by position; they stay grouped by server."""
    chosen = np.zeros(len(wanted.ids), np.bool_)
    chosen[positions] = True
    return part_of(wanted, chosen)
