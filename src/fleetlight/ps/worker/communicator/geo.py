# SPDX-License-Identifier: Apache-2.0
"""GeoSGD: workers train local copies and exchange differences with the servers every k steps.

A worker pushes (local - old) / workers, where `old` is its copy of the servers' values. The servers
add it and return their new values; the worker adds their difference to `old` to its local values.
The exchange runs in the background, so local progress during the exchange is kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.observe.log import logger
from fleetlight.observe.telemetry.step_times import WAIT, step_times
from fleetlight.ps.dtypes import as_tensor, flat_array
from fleetlight.ps.placement import Block
from fleetlight.ps.update import Floats, Ids, TableGradients, Update
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.communicator.base import Communicator
from fleetlight.ps.worker.communicator.local_rows import LocalRows
from fleetlight.ps.worker.joint_reads import Read
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.replay.step_journal import StepOrigin
from fleetlight.ps.worker.reply_values import ReplyValues, Wanted

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
