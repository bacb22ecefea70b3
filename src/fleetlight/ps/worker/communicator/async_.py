# SPDX-License-Identifier: Apache-2.0
"""Async: a thread sends pushes while the worker continues with its current values.

The queue of pushes is bounded: a worker that trains faster than the servers apply waits for them.
With dense parameters there is no queue by default: a push is sent after the reply to the previous
one. Each worker steps dense parameters itself and pushes the difference (`LocalDense`). With
`staleness`, a worker reads values only once they include enough steps of every worker.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetlight.ps.dtypes import bfloat16_sum
from fleetlight.ps.layers.table_gradient import merge
from fleetlight.ps.update import TableGradients, Update
from fleetlight.ps.worker.client import Client, ReplyValues
from fleetlight.ps.worker.communicator.base import Communicator
from fleetlight.ps.worker.communicator.local_dense import LocalDense
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.prefetcher import Prefetcher
from fleetlight.ps.worker.push_request import PushRequest

#: length of the queue for pushes with rows only
_ROWS_QUEUE = 4


class Async(Communicator):
    """One thread trains, one sends; they share a queue and the received values."""

    def __init__(
        self, client: Client, live: LocalParameters, *, queue_size: int | None, max_merge: int
    ) -> None:
        super().__init__(client, live)
        # prefetched rows are stale; `note` counts the staleness
        self.prefetcher = Prefetcher(client, self.note)
        serves_dense = self.plan.serves_dense and bool(self.plan.dense)
        #: send a push only after the reply to the previous one
        self._one_at_a_time = queue_size is None and serves_dense
        self._queue_size = _ROWS_QUEUE if queue_size is None else queue_size
        servers = range(client.server_num) if serves_dense else ()
        #: the servers with dense values
        self._dense_servers = {s for s in servers if client.placement.blocks_of(s)}
        self._dense = LocalDense(client, live) if serves_dense else None
        self._max_merge = max_merge
        self._changed = threading.Condition()
        self._queue: deque[PushRequest] = deque()
        #: number of pushes in the request being sent
        self._sending = 0
        #: the newest values, and the number of replies since values were last taken
        self._arrived: ReplyValues | None = None
        self._answered = 0
        self._slowest = 0
        self._failure: BaseException | None = None
        self._stopped = False
        self._waited_s = 0.0
        self._pushes = 0
        self._merged = 0
        self._longest = 0
        self._thread = threading.Thread(target=self._send, name="fleet-push", daemon=True)

    def start(self) -> None:
        """Pull the dense values and start the sender."""
        super().start()
        self._thread.start()

    def refresh(self) -> None:
        """Take the newest dense values; wait for slow workers if `staleness` requires it."""
        with self._changed:
            self._check()
            behind = self._slowest < self.at_least()
        if behind and self.plan.serves_dense and self.plan.dense:
            self._wait_for_others()
        self._put_in_place()

    def _put_in_place(self) -> bool:
        """Take the newest values that have arrived, if there are any."""
        with self._changed:
            arrived, self._arrived = self._arrived, None
            if arrived is None:
                return False
            answered, self._answered = self._answered, 0
        self.note(arrived)
        assert self._dense is not None
        self._dense.take(arrived, answered)
        return True

    def at_least(self) -> int:
        """A worker at step t reads values that include step t - staleness of every worker."""
        staleness = self.plan.staleness
        return 0 if staleness is None else max(0, self.steps - staleness)

    def _wait_for_others(self) -> None:
        start = time.monotonic()
        values = self.client.pull(
            [], dense=True, at_least=self.at_least(), phase=self.phase, step=self.steps
        )
        self._waited_s += time.monotonic() - start
        with self._changed:
            self._slowest = max(self._slowest, values.slowest)
            if self._arrived is None or not _is_as_new(self._arrived, values):
                self._arrived = values

    def step(self, update: Update) -> bool:
        """Queue the gradients for the sender."""
        self._wait_for_room()
        update.seen = tuple(self.versions)
        push = self._build_push(update, just_taken=self._put_in_place())
        self.steps += 1
        self.made += 1
        push.origin = self.origin(update)
        with self._changed:
            self._queue.append(push)
            self._longest = max(self._longest, len(self._queue))
            self._changed.notify_all()
        assert self.prefetcher is not None
        self.prefetcher.pushed(update.optimizer)
        return not push.skip

    def _wait_for_room(self) -> None:
        with self._changed:
            self._check()
            start = time.monotonic()
            while self._must_wait():
                self._changed.wait()
                self._check()
            self._waited_s += time.monotonic() - start

    def _build_push(self, update: Update, *, just_taken: bool) -> PushRequest:
        if update.skip:
            if self._dense is not None:
                self._dense.skipped()
            return _empty(update)
        if self._dense is None:
            return self.client.build_push(update, self.live)
        shares = self._dense.share(update.optimizer, just_taken=just_taken)
        return self.client.build_push(update, self.live, shares)

    def pull_dense(self) -> None:
        """The servers' dense values, in place of those here."""
        super().pull_dense()
        if self._dense is not None:
            self._dense.begin()

    def note(self, values: ReplyValues) -> None:
        """Record versions; newer rows do not make the dense values of their server newer."""
        for server, version in values.versions.items():
            if server in values.dense or server not in self._dense_servers:
                self.versions[server] = version

    def _must_wait(self) -> bool:
        """True when the next push must wait for earlier ones; call with `_changed` held."""
        if self._one_at_a_time:
            return bool(self._queue or self._sending)
        return len(self._queue) >= self._queue_size

    def flush(self) -> None:
        """Wait until the queue is empty and the last push has its reply."""
        with self._changed:
            while self._queue or self._sending:
                self._check()
                self._changed.wait()
            self._check()
        self._put_in_place()

    def resume(self) -> None:
        """Start the next phase; steps count from zero."""
        with self._changed:
            self._slowest = 0
        super().resume()

    def reopen(self) -> None:
        """Continue the phase; drop received values, which are older."""
        with self._changed:
            self._arrived, self._answered = None, 0
        super().reopen()

    def stop(self) -> None:
        """Send the remaining pushes and stop the sender."""
        try:
            super().stop()
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            if self._thread.is_alive():
                self._thread.join()

    def figures(self) -> dict[str, float]:
        """Counters of this worker."""
        return {
            **super().figures(),
            "pushes": float(self._pushes),
            "merged": float(self._merged),
            "longest queue": float(self._longest),
            "waited s": self._waited_s,
        }

    def _check(self) -> None:
        """Raise an error of the sender."""
        if self._failure is not None:
            raise self._failure

    def _send(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stopped:
                    self._changed.wait()
                if not self._queue:
                    return
                pushes = self._next()
                self._sending = len(pushes)
                self._changed.notify_all()
            try:
                values = self.client.push(
                    merged(pushes, self.client.server_num), phase=self.phase, everywhere=True
                )
            except BaseException as error:
                self._fail(error)
                return
            with self._changed:
                self._record_reply(values, len(pushes))

    def _next(self) -> list[PushRequest]:
        """Take the oldest pushes that may be merged."""
        pushes = [self._queue.popleft()]
        while (
            self._queue
            and len(pushes) < self._max_merge
            and self._queue[0].optimizer == pushes[0].optimizer
            and not (self._queue[0].skip or pushes[0].skip)
        ):
            pushes.append(self._queue.popleft())
        return pushes

    def _record_reply(self, values: ReplyValues, pushes: int) -> None:
        self._sending = 0
        self.acknowledged += pushes
        self._pushes += 1
        self._merged += pushes - 1
        self._slowest = max(self._slowest, values.slowest)
        self._answered += pushes
        if values.dense:
            self._arrived = values
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._sending = 0
            self._queue.clear()
            self._changed.notify_all()


def _is_as_new(one: ReplyValues, other: ReplyValues) -> bool:
    """True when `one` is as new as `other` on every server."""
    return all(one.versions.get(server, 0) >= v for server, v in other.versions.items())


def _empty(update: Update) -> PushRequest:
    """The request of a skipped step: other workers may wait for it."""
    return PushRequest(
        update.optimizer, update.step, update.options, {}, {}, [], True, seen=update.seen
    )


def merged(pushes: Sequence[PushRequest], servers: int) -> PushRequest:
    """Merge pushes: sum the gradients of each id, and dense gradients."""
    if len(pushes) == 1:
        return pushes[0]
    last = pushes[-1]
    tables: dict[int, list[TableGradients]] = {}
    for push in pushes:
        for number, part in push.tables.items():
            tables.setdefault(number, []).append(part)
    absent = set.intersection(*(set(push.absent) for push in pushes))
    return PushRequest(
        optimizer=last.optimizer,
        step=last.step,
        options=last.options,
        tables={
            n: parts[0] if len(parts) == 1 else merge(parts, servers) for n, parts in tables.items()
        },
        blocks={
            server: [_sum([push.blocks[server][n] for push in pushes]) for n in range(len(blocks))]
            for server, blocks in last.blocks.items()
        },
        absent=sorted(absent),
        merged=len(pushes),
        seen=pushes[0].seen,
        origin=last.origin,
    )


def _sum(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Sum into the first array; bfloat16 travels as its bits."""
    total = arrays[0]
    if total.dtype == np.uint16:
        return bfloat16_sum(arrays)
    for array in arrays[1:]:
        total += array
    return total
