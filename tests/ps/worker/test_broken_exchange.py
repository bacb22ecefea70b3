# SPDX-License-Identifier: Apache-2.0
"""A connection that breaks between two chunks of an exchange: each difference is added once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from tests.ps.serving import DIM, opened, plan

from fleetlight.kernels import dedup
from fleetlight.ps import messages as m
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport.channel import SocketChannel, connect_all
from fleetlight.ps.transport.interface import Connection, Reply
from fleetlight.ps.transport.listener import Listener
from fleetlight.ps.update import TableGradients
from fleetlight.ps.worker import client
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.connections import CONTROL, PUSH
from fleetlight.ps.worker.reply_values import Wanted

SERVERS, ROWS, STEPS, LIMIT_S = 2, 40, 6, 20.0


class BreakingChannel(SocketChannel):
    """Breaks around every third chunk; the inherited code repairs the request."""

    when: str
    server: CountingServer
    chunks = breaks = 0

    def send(self, message: m.Message, arrays: Sequence[Any] = ()) -> None:
        is_next = isinstance(message, m.GeoExchange) and self._is_next()
        if is_next and self.when == "before it is sent":
            self._break()
        self.server.answered.clear()
        super().send(message, arrays)
        if is_next and self.when == "before its answer":
            # the server has applied the chunk
            assert self.server.answered.wait(LIMIT_S)
            self._break()

    def _is_next(self) -> bool:
        self.chunks += 1
        return self.chunks % 3 == 0

    def _break(self) -> None:
        assert self._frames is not None
        self._frames.wire.close()
        self.breaks += 1


class CountingServer:
    """A server that counts the chunks it receives."""

    def __init__(self, server: Server) -> None:
        self.inner = server
        self.chunks = 0
        self.answered = threading.Event()

    def __call__(self, connection: Connection, message: m.Message, arrays: Sequence[Any]) -> Reply:
        reply = self.inner(connection, message, arrays)
        if isinstance(message, m.GeoExchange):
            self.chunks += 1
            self.answered.set()
        return reply

    def gone(self, connection: Connection, error: Any) -> None:
        self.inner.gone(connection, error)


@contextlib.contextmanager
def job(when: str) -> Iterator[tuple[Client, list[BreakingChannel], list[CountingServer]]]:
    """A GeoSGD worker, its push channels, and the servers."""
    the_plan = plan("geo", workers=1, server_num=SERVERS, k_steps=1)
    counting = [CountingServer(opened(the_plan, index=i)) for i in range(SERVERS)]
    listeners = [Listener(("127.0.0.1", 0), server) for server in counting]
    broken: list[BreakingChannel] = []

    def connect(lane: str) -> Sequence[SocketChannel]:
        known = lane if lane in (CONTROL, PUSH) else "pull"
        kind = BreakingChannel if lane == PUSH else SocketChannel
        channels = [
            kind(
                lambda listener=listener: listener.address,  # type: ignore[misc]
                f"server {i}",
                deadline_s=LIMIT_S,
                greeting=lambda i=i: m.Greeting("test", 0, 1, i, SERVERS, 1, known),  # type: ignore[misc]
            )
            for i, listener in enumerate(listeners)
        ]
        connect_all(channels, LIMIT_S)
        for channel, server in zip(channels, counting, strict=True):
            if isinstance(channel, BreakingChannel):
                channel.when, channel.server = when, server
                broken.append(channel)
        return channels

    worker = Client(0, 1, SERVERS, connect)
    try:
        worker.join(the_plan)
        yield worker, broken, counting
    finally:
        worker.close()
        for listener in listeners:
            listener.stop()


@pytest.mark.parametrize("when", ["before it is sent", "before its answer"])
def test_each_difference_is_added_once(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CHUNK_BYTES", 4 * (8 + 4 * DIM))
    distinct = dedup(np.arange(ROWS), SERVERS)
    with job(when) as (worker, channels, counting):
        for step in range(1, STEPS + 1):
            ones = np.ones((ROWS, DIM), np.float32)
            part = TableGradients(distinct.ids, distinct.starts, ones)
            values = worker.exchange({0: part}, {}, step=step)
            assert sum(span.stop - span.start for _, span, _ in values.pieces) == ROWS
            for _, _, rows in values.pieces:
                assert np.array_equal(rows, np.full_like(rows, step))
        [rows] = worker.pull([Wanted(0, distinct, insert=False)]).rows
        assert np.array_equal(rows, np.full((ROWS, DIM), STEPS, np.float32))
        repeated = STEPS if when == "before its answer" else 0
        for channel, server in zip(channels, counting, strict=True):
            assert channel.breaks >= STEPS
            assert server.chunks >= channel.chunks + repeated
