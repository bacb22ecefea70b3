# SPDX-License-Identifier: Apache-2.0
"""`LocalRows`: the rows of a table that a worker of GeoSGD trains by itself.

Beside its weights and state each row keeps `old`, what the worker believes the servers hold of it,
and the window in which it was used last. A window lasts from one exchange to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels import Deduped, RowTable, dedup, rule_named
from fleetlight.ps.plan import TablePlan
from fleetlight.ps.tables.rules import rule_options
from fleetlight.ps.update import Floats, Ids, TableGradients
from fleetlight.ps.worker.lookahead import part_of

#: reads rows of distinct ids from the servers
Fetch = Callable[[Deduped], Floats]


class LocalRows:
    """Used by the thread that trains only."""

    def __init__(self, plan: TablePlan, servers: int, workers: int, limit: int) -> None:
        self.plan = plan
        self._rule = rule_named(plan.rule.name, plan.rule.options)
        self._servers = servers
        self._workers = workers
        self._limit = limit
        self._used: list[Ids] = []
        self.window = 1
        self.clear()

    def clear(self) -> None:
        """Forget all rows: the servers have newer ones."""
        dim = self.plan.dim
        self._rows = RowTable(dim, self._rule, meta_width=dim + 1)
        self._used.clear()
        self._old = slice(self._rows.width - dim - 1, self._rows.width - 1)
        self._last = self._rows.width - 1

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, wanted: Deduped, fetch: Fetch, keep: bool) -> Floats:
        """Rows of distinct ids; those not used in the last window come from the servers anew.

        Without `keep` nothing is remembered of ids that have no row here.
        """
        numbers = self._rows.find(wanted.ids)
        fresh = numbers >= 0
        fresh[fresh] = self._rows.rows[numbers[fresh], self._last] >= self.window - 1
        if not fresh.all():
            missing = part_of(wanted, ~fresh)
            arrived = fetch(missing)
            if not keep:
                return self._mixed(numbers, fresh, arrived)
            self._renew(missing.ids, arrived)
            numbers = self._rows.find(wanted.ids)
        if keep:
            self._rows.rows[numbers, self._last] = self.window
            self._used.append(wanted.ids)
        return self._weights(numbers)

    def _mixed(self, numbers: Any, fresh: NDArray[np.bool_], arrived: Floats) -> Floats:
        rows = np.empty((len(numbers), self.plan.dim), np.float32)
        rows[fresh] = self._weights(numbers[fresh])
        rows[~fresh] = arrived
        return rows

    def _renew(self, ids: Ids, arrived: Floats) -> None:
        """Take the servers' rows; what was learned here and not yet sent is kept on top."""
        known = self._rows.find(ids) >= 0
        numbers = self._rows.insert(ids)
        rows = self._rows.rows
        dim = self.plan.dim
        old = numbers[known]
        rows[old, :dim] += arrived[known] - rows[old, self._old]
        rows[numbers[~known], :dim] = arrived[~known]
        rows[numbers, self._old] = arrived

    def learn(self, part: TableGradients, options: Mapping[str, Any], step: int) -> None:
        """Change the rows by the rule of the table."""
        hyper = self._rule.hyper(rule_options(self.plan.rule, options), step + 1)
        here = self._rows.find(part.ids) >= 0
        if here.all():
            self._rows.push(part.ids, part.gradients, hyper, distinct=True)
        else:
            # read so long ago that the row has been sent and forgotten
            self._rows.push(part.ids[here], part.gradients[here], hyper, distinct=True)

    def differences(self) -> TableGradients:
        """What was learned in this window, divided by the workers; begins the next window.

        Rows beyond the limit go with it, those first that were used longest ago.
        """
        ids = np.concatenate([*self._used, self._surplus()])
        self._used.clear()
        return self._take(ids)

    def rest(self) -> TableGradients:
        """What was learned and never sent, of all rows."""
        self._used.clear()
        return self._take(self._rows.ids_of(self._rows.numbers))

    def _take(self, ids: Ids) -> TableGradients:
        found = dedup(ids, self._servers)
        numbers = self._rows.find(found.ids)
        rows = self._rows.rows
        share = (self._weights(numbers) - rows[numbers, self._old]) / np.float32(self._workers)
        rows[numbers, self._old] += share
        self.window += 1
        self._evict(numbers)
        return TableGradients(found.ids, found.starts, share)

    def _surplus(self) -> Ids:
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
        return self._rows.ids_of(chosen)

    def _evict(self, numbers: Any) -> None:
        self._rows.remove(numbers[self._rows.rows[numbers, self._last] < 0])

    def take(self, ids: Ids, arrived: Floats) -> None:
        """The servers' rows after an exchange; progress made meanwhile is kept."""
        here = self._rows.find(ids) >= 0
        self._renew(ids[here], arrived[here])

    def _weights(self, numbers: Any) -> Floats:
        weights: Floats = self._rows.rows[numbers, : self.plan.dim]
        return weights
