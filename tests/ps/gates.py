# SPDX-License-Identifier: Apache-2.0
"""Holds up one lane of a worker, so that a test decides in which order things happen."""

from __future__ import annotations

import threading
from typing import Any

from fleetlight.ps.transport.interface import DEFAULT_RETRY
from fleetlight.ps.worker.client import Client

LIMIT_S = 20


class Gate:
    """Keeps requests from being sent (`send`), or answers from being taken, until it opens."""

    welcome = None
    patience = DEFAULT_RETRY

    def __init__(self, client: Client, lane: str, holds: str) -> None:
        self._opened, self._asked = threading.Event(), threading.Event()
        [self._channel] = client.open_lane(lane)
        self._holds = holds
        client._lanes[lane] = [self]  # type: ignore[list-item]

    def wait(self) -> None:
        """Until somebody stands before it."""
        assert self._asked.wait(LIMIT_S)

    def open(self) -> None:
        """Let everybody pass from now on."""
        self._opened.set()

    def shut(self) -> None:
        """Hold up who comes from now on."""
        self._opened.clear()
        self._asked.clear()

    def send(self, message: Any, arrays: Any = ()) -> None:
        self._hold("send")
        self._channel.send(message, arrays)

    def expect(self, deadline_s: Any = None) -> None:
        self._hold("receive")
        self._channel.expect(deadline_s)

    def reopen(self, limit_s: float) -> bool:
        return False

    def has_reply(self, within_s: float) -> bool:
        return bool(self._channel.has_reply(within_s))

    def receive(self, deadline_s: Any = None) -> Any:
        self._hold("receive")
        return self._channel.receive(deadline_s)

    def close(self) -> None:
        self._channel.close()

    def _hold(self, what: str) -> None:
        if what == self._holds:
            self._asked.set()
            assert self._opened.wait(LIMIT_S)
