# SPDX-License-Identifier: Apache-2.0
"""`Pusher`: how an async worker sends its pushes; `OnePush` has one in flight."""

from __future__ import annotations

import dataclasses
import time
from typing import Protocol

from fleetlight.ps.worker.client import Client, PushInFlight
from fleetlight.ps.worker.push_request import PushRequest
from fleetlight.ps.worker.reply_values import ReplyValues


@dataclasses.dataclass
class Arrived:
    """Replies to pushes that a worker has not taken yet."""

    #: the newest reply with dense values
    dense: ReplyValues | None = None
    #: the number of acknowledged pushes
    pushes: int = 0
    #: applied steps of the slowest worker, so far
    slowest: int = 0

    def add(self, values: ReplyValues, pushes: int) -> None:
        """Add the reply to some pushes."""
        self.pushes += pushes
        self.slowest = max(self.slowest, values.slowest)
        if values.dense:
            self.dense = values


class Pusher(Protocol):
    """Used by the training thread."""

    #: True if `put` sends the push itself, and the one before has its reply
    sends_at_once: bool

    def start(self) -> None:
        """Start threads."""

    def wait_for_room(self) -> None:
        """Wait until the next push can be put."""

    def put(self, push: PushRequest, phase: int) -> None:
        """Send a push, now or later."""

    def arrived(self) -> Arrived:
        """Take the replies since the last call; raise an error of a push."""

    def flush(self) -> None:
        """Wait until all pushes have their replies."""

    def stop(self) -> None:
        """Stop threads, after the last push."""

    @property
    def queued(self) -> int:
        """Pushes in flight, or in the queue."""

    def metrics(self) -> dict[str, float]:
        """Counters of this worker."""


class OnePush:
    """The training thread sends a push, and receives the reply before it sends the next one.

    For servers on this host: sending takes no time there, and a second thread would.
    """

    sends_at_once = True

    def __init__(self, client: Client) -> None:
        self._client = client
        self._in_flight: PushInFlight | None = None
        self._arrived = Arrived()
        self._failure: Exception | None = None
        self._pushes = 0
        self._waited_s = 0.0

    def start(self) -> None:
        """Do nothing: there is no thread."""

    def wait_for_room(self) -> None:
        """Receive the reply to the push in flight."""
        self._check()
        started, self._in_flight = self._in_flight, None
        if started is None:
            return
        began = time.monotonic()
        try:
            values = self._client.finish_push(started)
        except Exception as error:
            self._failure = error
            raise
        self._waited_s += time.monotonic() - began
        self._pushes += 1
        self._arrived.add(values, 1)

    def put(self, push: PushRequest, phase: int) -> None:
        """Send a push; take the reply of a server in this process."""
        self._in_flight = self._client.start_push(push, phase=phase)
        if self._client.server_is_embedded:
            self.wait_for_room()

    def arrived(self) -> Arrived:
        """Take the replies since the last call."""
        self._check()
        arrived, self._arrived = self._arrived, Arrived()
        return arrived

    def flush(self) -> None:
        """Receive the reply to the push in flight."""
        self.wait_for_room()

    def stop(self) -> None:
        """Do nothing: `flush` has received the last reply."""

    @property
    def queued(self) -> int:
        """1 while a push is in flight."""
        return int(self._in_flight is not None)

    def metrics(self) -> dict[str, float]:
        """Counters of this worker."""
        return {"pushes": float(self._pushes), "push_wait_seconds": self._waited_s}

    def _check(self) -> None:
        """Raise the error of an earlier push again: its gradients are lost."""
        if self._failure is not None:
            raise self._failure
