# SPDX-License-Identifier: Apache-2.0
"""Lets a test control the order of events: blocks a lane of a worker, waits for a call."""

import threading
from typing import Any

import pytest

from fleetlight.ps.transport.interface import DEFAULT_RETRY
from fleetlight.ps.worker.client import Client

LIMIT_S = 20


def called(of: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set as soon as a thread calls the method."""
    event, original = threading.Event(), getattr(of, method)

    def noted(*given: Any) -> Any:
        event.set()
        return original(*given)

    monkeypatch.setattr(of, method, noted)
    return event


class Gate:
    """Blocks requests before they are sent (`send`), or replies before they are received."""

    welcome = None
    retry = DEFAULT_RETRY
    is_local, is_embedded = True, False

    def __init__(self, client: Client, lane: str, holds: str) -> None:
        self._opened, self._asked = threading.Event(), threading.Event()
        [self._channel] = client.open_lane(lane)
        self._holds = holds
        client._lanes[lane] = [self]  # type: ignore[list-item]

    def wait(self) -> None:
        """Wait until a thread is blocked."""
        assert self._asked.wait(LIMIT_S)

    def open(self) -> None:
        """Let all threads pass from now on."""
        self._opened.set()

    def shut(self) -> None:
        """Block threads from now on."""
        self._opened.clear()
        self._asked.clear()

    def output(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._channel.output(shape, dtype)

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
