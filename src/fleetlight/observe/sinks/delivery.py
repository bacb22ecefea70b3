# SPDX-License-Identifier: Apache-2.0
"""`Delivery`: a thread that sends items to a service, and keeps a bounded number meanwhile."""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

_BATCH = 512
#: the pause after the first failure; each further one doubles it
_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


class DeliveryOutcome(enum.Enum):
    """What became of items that were sent."""

    ARRIVED = enum.auto()
    #: the service has answered that it does not take them
    REFUSED = enum.auto()
    #: the service has not answered
    LOST = enum.auto()


class Delivery(Generic[T]):
    """Sends items in their order; a service that fails gets them again later.

    One that the service refuses while the next arrives is dropped, and counts as such.
    """

    def __init__(
        self,
        send: Callable[[Sequence[T]], DeliveryOutcome],
        most: int | None = None,
        retry_s: float = _RETRY_S,
    ) -> None:
        """`most`: how many items may wait."""
        self._send, self._most, self._retry_s = send, most, retry_s
        self._waiting: list[T] = []
        self._dropped = 0
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="fleet-delivery", daemon=True)
        self._thread.start()

    def add(self, item: T) -> None:
        """Send an item soon; if too many wait, the oldest is dropped."""
        with self._changed:
            self._waiting.append(item)
            if self._most is not None and len(self._waiting) > self._most:
                del self._waiting[0]
                self._dropped += 1
            self._changed.notify()

    def close(self, until: float) -> int:
        """Send the rest until a monotonic time; returns how many items the service lacks.

        A service that does not answer, or takes nothing, ends this early.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(max(0.0, until - time.monotonic()))
        with self._changed:
            return self._dropped + len(self._waiting)

    def _run(self) -> None:
        pause, size = self._retry_s, _BATCH
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                batch, dropped = self._waiting[:size], self._dropped
                is_last = self._is_closing
            if not batch:
                return
            outcome = self._send(batch)
            if outcome is DeliveryOutcome.ARRIVED:
                pause, size = self._retry_s, _BATCH
                self._remove(len(batch), dropped)
            elif len(batch) == 1 and self._next_arrives():
                size = _BATCH
            elif is_last and (outcome is DeliveryOutcome.LOST or len(batch) == 1):
                return
            else:
                # the service may refuse one of them, or so many
                size = max(1, len(batch) // 2)
                self._await_close(pause)
                pause = min(2 * pause, _MAX_RETRY_S)

    def _next_arrives(self) -> bool:
        """Send the second item; if it arrives, the service refuses the first, which is dropped."""
        with self._changed:
            two = self._waiting[:2]
        if len(two) < 2 or self._send(two[1:]) is not DeliveryOutcome.ARRIVED:
            return False
        with self._changed:
            left = [item for item in self._waiting if item is not two[1]]
            self._waiting = [item for item in left if item is not two[0]]
            self._dropped += len(left) - len(self._waiting)
        return True

    def _remove(self, arrived: int, dropped_before: int) -> None:
        with self._changed:
            # some may have been dropped while they were on their way
            gone = min(arrived, self._dropped - dropped_before)
            self._dropped -= gone
            del self._waiting[: arrived - gone]

    def _await_close(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing, seconds)
