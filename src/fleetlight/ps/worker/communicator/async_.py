# SPDX-License-Identifier: Apache-2.0
"""Async: pushes are in flight while the worker continues with its current values.

A `Pusher` sends them. The number of pushes in flight is bounded; with dense parameters it is one.
Each worker steps dense parameters itself and pushes the difference (`LocalDense`). With
`staleness`, a worker reads values only once they include enough steps of every worker.
"""

from __future__ import annotations

import time

from fleetlight.observe.telemetry.step_times import WAIT, step_times
from fleetlight.ps.update import Update
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.communicator.base import Communicator
from fleetlight.ps.worker.communicator.local_dense import LocalDense
from fleetlight.ps.worker.communicator.push_queue import PushQueue
from fleetlight.ps.worker.communicator.pusher import OnePush, Pusher
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.lookahead.lookahead import Lookahead
from fleetlight.ps.worker.lookahead.prefetcher import Prefetcher
from fleetlight.ps.worker.lookahead.pull_in_push import PullInPush
from fleetlight.ps.worker.push_request import PushRequest
from fleetlight.ps.worker.reply_values import ReplyValues

#: length of the queue for pushes with rows only
_ROWS_QUEUE = 4


class Async(Communicator):
    """Used by the training thread, apart from lookups."""

    def __init__(
        self, client: Client, live: LocalParameters, *, queue_size: int | None, max_merge: int
    ) -> None:
        super().__init__(client, live)
        serves_dense = self.plan.serves_dense and bool(self.plan.dense)
        self._pusher: Pusher
        self.lookahead: Lookahead
        if client.servers_are_local and queue_size is None and max_merge == 1:
            self._pusher = OnePush(client)
            # rows of a server in this process are those after each step
            renews = client.server_is_embedded
            self.lookahead = PullInPush(client, renews=renews, note=self.note)
        else:
            self._pusher = PushQueue(
                client,
                size=_ROWS_QUEUE if queue_size is None else queue_size,
                one_at_a_time=queue_size is None and serves_dense,
                max_merge=max_merge,
            )
            # prefetched rows are stale; `note` counts the staleness
            self.lookahead = Prefetcher(client, self.note)
        servers = range(client.server_num) if serves_dense else ()
        #: the servers with dense values
        self._dense_servers = {s for s in servers if client.placement.blocks_of(s)}
        self._dense = LocalDense(client, live) if serves_dense else None
        #: the newest dense values that have arrived, and the replies since values were last taken
        self._newest: ReplyValues | None = None
        self._answered = 0
        #: applied steps of the slowest worker in this phase
        self._slowest = 0
        self._waited_s = 0.0

    def start(self) -> None:
        """Pull the dense values and start to send."""
        super().start()
        self._pusher.start()

    def refresh(self) -> None:
        """Take the newest dense values; wait for slow workers if `staleness` requires it."""
        self._collect()
        if self._slowest < self.at_least() and self._dense is not None:
            self._wait_for_others()
        self._put_in_place()

    def _collect(self) -> None:
        """Collect the replies that have arrived."""
        arrived = self._pusher.arrived()
        self.acknowledged += arrived.pushes
        self._answered += arrived.pushes
        self._slowest = max(self._slowest, arrived.slowest)
        self._newest = arrived.dense or self._newest

    def _put_in_place(self) -> bool:
        """Take the newest dense values that have arrived, if there are any."""
        self._collect()
        newest, self._newest = self._newest, None
        if newest is None:
            return False
        answered, self._answered = self._answered, 0
        self.note(newest)
        assert self._dense is not None
        self._dense.take(newest, answered)
        return True

    def at_least(self) -> int:
        """A worker at step t reads values that include step t - staleness of every worker."""
        staleness = self.plan.staleness
        return 0 if staleness is None else max(0, self.steps - staleness)

    def _wait_for_others(self) -> None:
        start = time.monotonic()
        with step_times.part(WAIT):
            values = self.client.pull(
                [], dense=True, at_least=self.at_least(), phase=self.phase, step=self.steps
            )
        self._waited_s += time.monotonic() - start
        self._collect()
        self._slowest = max(self._slowest, values.slowest)
        if self._newest is None or not _is_as_new(self._newest, values):
            self._newest = values

    def step(self, update: Update) -> bool:
        """Push the gradients; the reply may arrive during the next step."""
        with step_times.part(WAIT):
            self._pusher.wait_for_room()
        update.seen = tuple(self.versions)
        push = self._build_push(update, just_taken=self._put_in_place())
        self.steps += 1
        self.made += 1
        push.origin = self.origin(update)
        push.ahead = self.lookahead.wanted(update.optimizer)
        self._pusher.put(push, self.phase)
        self.lookahead.pushed(update.optimizer)
        return not push.skip

    def _build_push(self, update: Update, *, just_taken: bool) -> PushRequest:
        if update.skip:
            if self._dense is not None:
                self._dense.skipped()
            return _empty(update)
        memory = self.client.push_memory(update) if self._pusher.sends_at_once else None
        if self._dense is None:
            return self.client.build_push(update, self.live, memory=memory)
        shares = self._dense.share(update.optimizer, just_taken=just_taken, memory=memory)
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

    def flush(self) -> None:
        """Wait for the replies to all pushes."""
        self._pusher.flush()
        self._put_in_place()

    def resume(self) -> None:
        """Start the next phase; steps count from zero."""
        self._slowest = 0
        super().resume()

    def reopen(self) -> None:
        """Continue the phase; drop received values, which are older."""
        self._collect()
        self._newest, self._answered = None, 0
        super().reopen()

    def stop(self) -> None:
        """Wait for the replies to all pushes, and release threads."""
        try:
            super().stop()
        finally:
            self._pusher.stop()

    @property
    def queued_pushes(self) -> int:
        return self._pusher.queued

    def metrics(self) -> dict[str, float]:
        """Counters of this worker."""
        pushes = self._pusher.metrics()
        pushes["push_wait_seconds"] += self._waited_s
        return {**super().metrics(), **pushes}


def _is_as_new(one: ReplyValues, other: ReplyValues) -> bool:
    """True when `one` is as new as `other` on every server."""
    return all(one.versions.get(server, 0) >= v for server, v in other.versions.items())


def _empty(update: Update) -> PushRequest:
    """The request of a skipped step: other workers may wait for it."""
    return PushRequest(
        update.optimizer, update.step, update.options, {}, {}, [], True, seen=update.seen
    )
