# SPDX-License-Identifier: Apache-2.0
"""GeoSGD: workers train local copies and exchange differences with the servers every k steps.

A worker pushes (local - old) / workers, where `old` is its copy of the servers' values. The servers
add it and return their new values; the worker adds their difference to `old` to its local values.
The exchange runs in the background, so local progress during the exchange is kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.kernels import Deduped, RowTable, dedup, rule_named
from fleetlight.kernels.rows import copies
from fleetlight.observe.log import logger
from fleetlight.observe.telemetry.step_times import WAIT, step_times
from fleetlight.ps.dtypes import as_tensor, flat_array
from fleetlight.ps.placement import Block
from fleetlight.ps.plan import TablePlan
from fleetlight.ps.tables.optimizers import rule_options
from fleetlight.ps.update import Floats, Ids, TableGradients, Update
from fleetlight.ps.wire_forms import as_sent
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.communicator.base import Communicator
from fleetlight.ps.worker.joint_reads import Read
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.lookahead.lookahead import part_of
from fleetlight.ps.worker.replay.step_journal import StepOrigin
from fleetlight.ps.worker.reply_values import ReplyValues, Wanted

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


Array = NDArray[Any]
_TORCH = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class Geo(Communicator):
    """Training uses local rows; one exchange at a time is in progress.

    It does not prefetch: most rows of a batch are local.
    """

    def __init__(self, client: Client, live: LocalParameters, *, cache_rows: int) -> None:
        super().__init__(client, live)
        servers = client.server_num
        self._tables = [
            LocalRows(table, servers, lambda: client.active, cache_rows)
            for table in self.plan.tables
        ]
        self._blocks = [b for s in range(servers) for b in client.placement.blocks_of(s)]
        #: the worker's copy of the servers' dense blocks
        self._old: list[Tensor] = []
        self._thread = ThreadPoolExecutor(1, "fleet-geo")
        self._exchange: Future[ReplyValues] | None = None
        #: ids of the exchange in progress, and the number of steps at its start
        self._sent: dict[int, Ids] = {}
        self._sent_steps = 0
        self._exchanges = 0
        #: the epoch of the servers' values
        self._epoch = client.epoch
        #: True between `settle` and `reopen`: all progress is pushed
        self._has_settled = False
        self._waited_s = 0.0
        #: the position of the last step
        self._origin: StepOrigin | None = None
        self._last_optimizer = len(self.plan.optimizers) - 1

    def start(self) -> None:
        """Pull the dense values."""
        super().start()
        self._old = [self._packed(block) for block in self._blocks]
        for table in self.plan.tables:
            if table.rule.name != "sgd":
                logger.warning(
                    "GeoSGD: table %s uses %s, whose state each worker computes from its own "
                    "gradients; the quality is verified for plain SGD only",
                    table.name,
                    table.rule.name,
                )

    def refresh(self) -> None:
        """Take the result of a completed exchange."""
        if self._exchange is not None and self._exchange.done():
            self._finish_exchange()

    def pull(self, wanted: Sequence[Wanted]) -> list[Floats]:
        """Return local rows; pull those that are missing or expired."""
        # all threads lock tables in the same order, so none waits for another's
        order = sorted(range(len(wanted)), key=lambda number: wanted[number].table)
        pulled = dict(zip(order, super().pull([wanted[n] for n in order]), strict=True))
        return [pulled[number] for number in range(len(wanted))]

    def read(self, wanted: Wanted) -> Read:
        """Read local rows of one table."""
        return self._tables[wanted.table].read(wanted.ids, keep=wanted.insert)

    def step(self, update: Update) -> bool:
        """Update local rows; start an exchange every k steps."""
        if not update.skip:
            for number, part in update.tables.items():
                group = self.plan.tables[number].group
                self._tables[number].learn(part, update.options[group], update.step)
        self.made += 1
        self._has_settled = False
        if update.optimizer == self._last_optimizer:
            self.steps += 1
            self._origin = self.origin(update)
            if self.steps % self.plan.k_steps == 0:
                self._start_exchange()
        return not update.skip

    def flush(self) -> None:
        """Wait for the exchange in progress."""
        if self._exchange is not None:
            start = time.monotonic()
            with step_times.part(WAIT):
                self._exchange.exception()
            self._waited_s += time.monotonic() - start
            self._finish_exchange()

    def settle(self) -> None:
        """Push the remaining progress of this worker."""
        if self._has_settled:
            return
        self.flush()
        rest = {number: table.rest() for number, table in enumerate(self._tables)}
        dense = self._dense_differences()
        self.client.exchange(_some(rest), dense, step=self.steps, wants=False, origin=self._origin)
        self.acknowledged = self.made
        self.client.end_phase(self.phase)
        self._has_settled = True

    def reopen(self) -> None:
        """Continue from the servers' values."""
        super().reopen()
        self._has_settled = False
        is_loaded, self._epoch = self._epoch != self.client.epoch, self.client.epoch
        for table in self._tables:
            # the rule's state does not belong to values of a checkpoint
            table.clear() if is_loaded else table.expire()
        self._old = [self._packed(block) for block in self._blocks]

    def stop(self) -> None:
        """Push the remaining progress and stop the thread."""
        try:
            self.settle()
        finally:
            self._thread.shutdown()

    def metrics(self) -> dict[str, float]:
        """Counters of this worker."""
        return {
            **super().metrics(),
            "exchanges": float(self._exchanges),
            "push_wait_seconds": self._waited_s,
            "local_rows": float(sum(map(len, self._tables))),
        }

    def _start_exchange(self) -> None:
        self.flush()
        differences = _some(
            {number: table.differences() for number, table in enumerate(self._tables)}
        )
        self._sent = {number: part.ids for number, part in differences.items()}
        dense = self._dense_differences()
        self._exchanges += 1
        self._sent_steps = self.made
        self._exchange = self._thread.submit(
            self.client.exchange, differences, dense, step=self.steps, origin=self._origin
        )

    def _finish_exchange(self) -> None:
        assert self._exchange is not None
        values, self._exchange = self._exchange.result(), None
        self.acknowledged = self._sent_steps
        self.note(values)
        for number, span, rows in values.pieces:
            self._tables[number].take(self._sent[number][span], rows)
        self._take_dense(values)

    def _dense_differences(self) -> dict[int, Sequence[Array]]:
        differences: dict[int, list[Array]] = {}
        for block, old in zip(self._blocks, self._old, strict=True):
            share = (self._packed(block) - old) / self.client.active
            old += share
            differences.setdefault(block.server, []).append(flat_array(share))
        return dict(differences)

    def _take_dense(self, values: ReplyValues) -> None:
        arrived = {server: iter(arrays) for server, arrays in values.dense.items()}
        for number, block in enumerate(self._blocks):
            now = as_tensor(next(arrived[block.server]), _TORCH[block.dtype]).clone()
            live = self._packed(block) + (now - self._old[number])
            self.live.unpack(block, flat_array(live))
            self._old[number] = now

    def _packed(self, block: Block) -> Tensor:
        return as_tensor(self.live.pack(block), _TORCH[block.dtype])


def _some(parts: dict[int, TableGradients]) -> dict[int, TableGradients]:
    """The tables that have rows."""
    return {number: part for number, part in parts.items() if len(part.ids)}
