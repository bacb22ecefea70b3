# SPDX-License-Identifier: Apache-2.0
"""`LocalRows`: the rows of a table that a worker of GeoSGD trains by itself.

Beside its weights and state each row keeps what the worker believes the servers hold of it, and the
window in which it was used last. A window lasts from one exchange to the next.
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
from fleetlight.ps.worker.prefetcher import part_of

#: reads rows of distinct ids from the servers
Fetch = Callable[[Deduped], Floats]
Numbers = NDArray[np.int64]
#: A row that was not used for so many windows is fetched anew before it is used again. Until then
#: it may miss what others have learned since its last exchange: little, if they use it as seldom.
KEPT_WINDOWS = 100
#: windows are counted in float32
MOST_WINDOWS = 1 << 23
#: the window of a row that is to be read again, as of a new one
_EXPIRED = 0
#: forwards whose row numbers are remembered for the step that follows
_REMEMBERED = 8


class LocalRows:
    """Changed by the thread that trains; any other may read."""

    def __init__(self, plan: TablePlan, servers: int, workers: int, limit: int) -> None:
        self.plan = plan
        self._rule = rule_named(plan.rule.name, plan.rule.options)
        self._servers = servers
        self._workers = workers
        self._limit = limit
        #: held while rows are read or change
        self._lock = threading.Lock()
        self._last_hyper: tuple[Any, int, NDArray[np.float64]] = None, 0, np.empty(0)
        self.window = 1
        self.clear()

    def clear(self) -> None:
        """Forget all rows: the servers have newer ones."""
        dim = self.plan.dim
        with self._lock:
            self._rows = RowTable(dim, self._rule, meta_width=dim + 1)
            self._last = self._rows.width - 1
            #: numbers of the rows used in this window, each once
            self._used: list[Numbers] = []
            #: ids that were read, the very arrays, and their numbers
            self._visited: list[tuple[Ids, Numbers]] = []

    def expire(self) -> None:
        """Read all rows again when they are used next; what the rule knows of them stays."""
        dim = self.plan.dim
        with self._lock:
            rows = self._rows.rows
            # nothing is left to be sent
            rows[:, self._last - dim : self._last] = rows[:, :dim]
            rows[:, self._last] = _EXPIRED
            self._used.clear()
            self._visited.clear()

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, wanted: Deduped, fetch: Fetch, keep: bool) -> Floats:
        """Rows of distinct ids; those that are not here, or are old, come from the servers.

        Without `keep` nothing is remembered of ids that have no row here.
        """
        weights = np.empty((len(wanted.ids), self.plan.dim), np.float32)
        if keep:
            with self._lock:
                self._read_to_train(wanted, weights, fetch)
            return weights
        with self._lock:
            numbers = self._rows.find(wanted.ids)
            stale = copies.read(self._rows.rows, numbers, self._oldest, weights)
        if len(stale):
            weights[stale] = fetch(_of_positions(wanted, stale))
        return weights

    @property
    def _oldest(self) -> int:
        """The window since which a row must have been used."""
        return max(1, self.window - KEPT_WINDOWS)

    def _read_to_train(self, wanted: Deduped, weights: Floats, fetch: Fetch) -> None:
        numbers = self._rows.find(wanted.ids)
        rows = self._rows.rows
        stale, used = copies.visit(rows, numbers, self._oldest, self.window, weights)
        self._used.append(used)
        if len(stale):
            missing = _of_positions(wanted, stale)
            arrived = fetch(missing)
            numbers[stale] = mine = self._rows.insert(missing.ids)
            copies.renew(self._rows.rows, mine, arrived)
            self._used.append(copies.mark(self._rows.rows, mine, self.window))
            weights[stale] = self._rows.rows[mine, : self.plan.dim]
        self._remember(wanted.ids, numbers)

    def _remember(self, ids: Ids, numbers: Numbers) -> None:
        if len(self._visited) == _REMEMBERED:
            del self._visited[0]
        self._visited.append((ids, numbers))

    def learn(self, part: TableGradients, options: Mapping[str, Any], step: int) -> None:
        """Change the rows by the rule of the table."""
        hyper = self._hyper(options, step)
        with self._lock:
            numbers, gradients = self._numbers(part.ids), part.gradients
            if len(numbers) and numbers.min() < 0:
                # read so long ago that the row has been sent and forgotten
                here = numbers >= 0
                numbers, gradients = numbers[here], gradients[here]
            self._rows.learn(numbers, gradients, hyper)

    def _hyper(self, options: Mapping[str, Any], step: int) -> NDArray[np.float64]:
        """The numbers of the rule; the same options come again as the same object."""
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
        """What was learned in this window, divided by the workers; begins the next window.

        Rows beyond the limit go with it, those first that were used longest ago.
        """
        with self._lock:
            return self._take(np.concatenate([*self._used, self._surplus()]))

    def rest(self) -> TableGradients:
        """What was learned and never sent, of all rows."""
        with self._lock:
            numbers = self._rows.numbers.astype(np.int64)
            return self._take(numbers[self._rows.rows[numbers, self._last] != _EXPIRED])

    def _take(self, numbers: Numbers) -> TableGradients:
        self._used.clear()
        found = dedup(self._rows.ids_of(numbers), self._servers)
        grouped = np.empty_like(numbers)
        grouped[found.inverse] = numbers
        told = copies.share(self._rows.rows, grouped, self._workers, self.plan.dim)
        self.window += 1
        self._evict(grouped)
        if self.window > MOST_WINDOWS:
            self._count_anew()
        return TableGradients(found.ids, found.starts, told)

    def _count_anew(self) -> None:
        """As if all rows had been used in the first window, which has just ended."""
        last = self._rows.rows[:, self._last]
        last[last != _EXPIRED] = 1
        self.window = 2

    def _surplus(self) -> Numbers:
        """Rows to forget, which have to be sent before."""
        over = len(self._rows) - self._limit
        if over <= 0:
            return np.empty(0, np.int64)
        numbers = self._rows.numbers
        last = self._rows.rows[numbers, self._last]
        chosen = numbers[np.argpartition(last, over - 1)[:over]]
        # those of the running window are still to be answered
        chosen = chosen[self._rows.rows[chosen, self._last] < self.window]
        self._rows.rows[chosen, self._last] = -1
        surplus: Numbers = chosen.astype(np.int64)
        return surplus

    def _evict(self, numbers: Numbers) -> None:
        gone = numbers[self._rows.rows[numbers, self._last] < 0]
        if len(gone):
            self._rows.remove(gone)
            # their numbers may be given to other ids
            self._visited.clear()

    def take(self, ids: Ids, arrived: Floats) -> None:
        """The servers' rows after an exchange; progress made meanwhile is kept."""
        with self._lock:
            copies.renew(self._rows.rows, self._rows.find(ids), arrived)


def _of_positions(wanted: Deduped, positions: Numbers) -> Deduped:
    """The distinct ids at these positions, still grouped by server."""
    chosen = np.zeros(len(wanted.ids), np.bool_)
    chosen[positions] = True
    return part_of(wanted, chosen)
