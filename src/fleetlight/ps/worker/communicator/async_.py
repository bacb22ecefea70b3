# SPDX-License-Identifier: Apache-2.0
"""Async: pushes are in flight while the worker continues with its current values.

A `Pusher` sends them. The number of pushes in flight is bounded; with dense parameters it is one.
Each worker steps dense parameters itself and pushes the difference (`LocalDense`). With
`staleness`, a worker reads values only once they include enough steps of every worker.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.kernels import difference, rebase
from fleetlight.observe.telemetry.step_times import WAIT, step_times
from fleetlight.ps.dtypes import as_tensor, bfloat16_sum, flat_array
from fleetlight.ps.layers.table_gradient import merge
from fleetlight.ps.placement import Block
from fleetlight.ps.update import TableGradients, Update
from fleetlight.ps.wire_forms import Output, no_output
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.communicator.base import Communicator
from fleetlight.ps.worker.communicator.pusher import Arrived, OnePush, Pusher
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.lookahead.lookahead import Lookahead
from fleetlight.ps.worker.lookahead.prefetcher import Prefetcher
from fleetlight.ps.worker.lookahead.pull_in_push import PullInPush
from fleetlight.ps.worker.push_request import PushRequest
from fleetlight.ps.worker.reply_values import ReplyValues

Array = NDArray[Any]


class LocalDense:
    """Used by the training thread. Local values are the servers' plus the pending differences."""

    def __init__(self, client: Client, live: LocalParameters) -> None:
        self._live, self._client = live, client
        servers = range(client.server_num) if client.plan.serves_dense else ()
        #: by server, in wire order
        self._blocks: dict[int, list[_LocalBlock]] = {
            server: [_LocalBlock(block, live) for block in client.placement.blocks_of(server)]
            for server in servers
        }
        #: the differences of each push without a reply
        self._pending: deque[list[tuple[_LocalBlock, Tensor]]] = deque()

    def begin(self) -> None:
        """Start from the servers' values, with no push in flight."""
        self._pending.clear()
        for blocks in self._blocks.values():
            for held in blocks:
                held.since = held.packed()

    def share(
        self,
        optimizer: int,
        *,
        just_taken: bool = False,
        memory: Sequence[Output] | None = None,
    ) -> dict[int, list[Array]]:
        """The differences of one optimizer since the last push, divided by the workers.

        `just_taken`: no step followed the last `take`, which knows the differences. `memory` is
        that of each server's blocks.
        """
        shares: dict[int, list[Array]] = {}
        learned: list[tuple[_LocalBlock, Tensor]] = []
        for server, blocks in self._blocks.items():
            for held in blocks:
                if held.block.optimizer == optimizer:
                    progress = held.learned(just_taken)
                    learned.append((held, progress))
                    output = no_output if memory is None else memory[server]
                    shares.setdefault(server, []).append(self._part(progress, output))
        self._pending.append(learned)
        return shares

    def _part(self, progress: Tensor, output: Output) -> Array:
        """This worker's part of the mean."""
        memory = output(tuple(progress.shape), flat_array(progress).dtype.name)
        workers = self._client.active
        if memory is None and workers == 1:
            return flat_array(progress)
        into = None if memory is None else as_tensor(memory, progress.dtype)
        return flat_array(torch.div(progress, workers, out=into))

    def skipped(self) -> None:
        """Record a push without differences."""
        self._pending.append([])

    def take(self, values: ReplyValues, answered: int) -> None:
        """Take the servers' values and add the pending differences of pushes without a reply."""
        for _ in range(answered):
            self._pending.popleft()
        pending = [one for learned in self._pending for one in learned]
        for server, arrays in values.dense.items():
            for held, array in zip(self._blocks[server], arrays, strict=True):
                on_top = [progress for other, progress in pending if other is held]
                held.rebase(array, on_top)
        self._live.note()


class _LocalBlock:
    """A block of local values. Kernels handle float32 in main memory, torch all else."""

    def __init__(self, block: Block, live: LocalParameters) -> None:
        self.block, self._live = block, live
        self.dtype: torch.dtype = getattr(torch, block.dtype)
        #: the local values after the last push or `take`
        self.since = torch.empty(0)
        #: the differences that the last rebase added
        self._on_top: Tensor | None = None

    def packed(self) -> Tensor:
        """A copy of the local values."""
        return as_tensor(self._live.pack(self.block), self.dtype)

    def learned(self, just_taken: bool) -> Tensor:
        """The difference since the last push."""
        progress, self._on_top = self._on_top, None
        if progress is not None and just_taken:
            self.since += progress
            return progress
        if (views := self._views()) is None:
            packed = self.packed()
            progress, self.since = packed - self.since, packed
            return progress
        progress, since = torch.empty(self.block.size, dtype=self.dtype), self.since.numpy()
        out = progress.numpy()
        for place, local in views:
            difference(local, since[place], out[place])
        return progress

    def rebase(self, now: Array, on_top: Sequence[Tensor]) -> None:
        """Take the servers' values and add the pending differences."""
        if (views := self._views()) is None:
            self._on_top = self._rebased_by_torch(as_tensor(now, self.dtype), on_top)
            return
        self._on_top, since = torch.empty(self.block.size, dtype=self.dtype), self.since.numpy()
        pending, out = _sum_of(on_top), self._on_top.numpy()
        for place, local in views:
            rebase(local, since[place], now[place], pending[place], out[place])

    def _views(self) -> list[tuple[slice, NDArray[Any]]] | None:
        return self._live.views(self.block) if self.dtype == torch.float32 else None

    def _rebased_by_torch(self, now: Tensor, on_top: Sequence[Tensor]) -> Tensor:
        progress = self.packed().sub_(self.since)
        self.since.copy_(now)
        for one in on_top:
            self.since += one
        self._live.unpack(self.block, flat_array(self.since + progress))
        return progress


def _sum_of(differences: Sequence[Tensor]) -> NDArray[Any]:
    """The sum of pending differences; empty without any."""
    if not differences:
        return np.empty(0, np.float32)
    total = differences[0]
    for one in differences[1:]:
        total = total + one
    return total.numpy()


class PushQueue:
    """The queue is bounded: a worker that trains faster than the servers apply waits for them."""

    sends_at_once = False

    def __init__(self, client: Client, *, size: int, one_at_a_time: bool, max_merge: int) -> None:
        """`one_at_a_time`: send a push only after the reply to the previous one."""
        self._client = client
        self._size, self._one_at_a_time, self._max_merge = size, one_at_a_time, max_merge
        self._changed = threading.Condition()
        #: pushes and their phases
        self._queue: deque[tuple[PushRequest, int]] = deque()
        #: number of pushes in the request being sent
        self._sending = 0
        self._arrived = Arrived()
        self._failure: BaseException | None = None
        self._stopped = False
        self._waited_s = 0.0
        self._pushes = 0
        self._merged = 0
        self._longest = 0
        self._thread = threading.Thread(target=self._send, name="fleet-push", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wait_for_room(self) -> None:
        """Wait until the next push has room in the queue."""
        with self._changed:
            self._check()
            start = time.monotonic()
            while self._must_wait():
                self._changed.wait()
                self._check()
            self._waited_s += time.monotonic() - start

    def _must_wait(self) -> bool:
        if self._one_at_a_time:
            return bool(self._queue or self._sending)
        return len(self._queue) >= self._size

    def put(self, push: PushRequest, phase: int) -> None:
        """Queue a push for the thread."""
        with self._changed:
            self._queue.append((push, phase))
            self._longest = max(self._longest, len(self._queue))
            self._changed.notify_all()

    def arrived(self) -> Arrived:
        """Take the replies since the last call, and raise an error of the thread."""
        with self._changed:
            self._check()
            arrived, self._arrived = self._arrived, Arrived()
        return arrived

    def flush(self) -> None:
        """Wait until the queue is empty and the last push has its reply."""
        with self._changed:
            while self._queue or self._sending:
                self._check()
                self._changed.wait()
            self._check()

    def stop(self) -> None:
        """Stop the thread after the last push."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def queued(self) -> int:
        """Pushes in the queue, and those that the thread sends."""
        return len(self._queue) + self._sending

    def metrics(self) -> dict[str, float]:
        """Counters of this worker."""
        return {
            "pushes": float(self._pushes),
            "merged_pushes": float(self._merged),
            "longest_push_queue": float(self._longest),
            "push_wait_seconds": self._waited_s,
        }

    def _check(self) -> None:
        """Raise an error of the thread."""
        if self._failure is not None:
            raise self._failure

    def _send(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._stopped:
                    self._changed.wait()
                if not self._queue:
                    return
                pushes, phase = self._next()
                self._sending = len(pushes)
                self._changed.notify_all()
            try:
                values = self._client.push(merged(pushes, self._client.server_num), phase=phase)
            except BaseException as error:
                self._fail(error)
                return
            with self._changed:
                self._record_reply(values, len(pushes))

    def _next(self) -> tuple[list[PushRequest], int]:
        """Take the oldest pushes that may be merged, and their phase."""
        first, phase = self._queue.popleft()
        pushes = [first]
        while (
            self._queue
            and len(pushes) < self._max_merge
            and self._queue[0][0].optimizer == first.optimizer
            and not (self._queue[0][0].skip or first.skip)
        ):
            pushes.append(self._queue.popleft()[0])
        return pushes, phase

    def _record_reply(self, values: ReplyValues, pushes: int) -> None:
        self._sending = 0
        self._pushes += 1
        self._merged += pushes - 1
        self._arrived.add(values, pushes)
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._sending = 0
            self._queue.clear()
            self._changed.notify_all()


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
        ahead=[one for push in pushes for one in push.ahead],
    )


def _sum(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Sum into the first array; bfloat16 travels as its bits."""
    total = arrays[0]
    if total.dtype == np.uint16:
        return bfloat16_sum(arrays)
    for array in arrays[1:]:
        total += array
    return total


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
