# SPDX-License-Identifier: Apache-2.0
"""`PushQueue`: a thread sends pushes while the worker trains on.

For servers on other hosts, where a push may take longer than a step, and for merged pushes.
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
from fleetlight.ps.update import TableGradients
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.communicator.pusher import Arrived
from fleetlight.ps.worker.push_request import PushRequest
from fleetlight.ps.worker.reply_values import ReplyValues


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
