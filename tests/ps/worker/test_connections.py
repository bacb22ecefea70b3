# SPDX-License-Identifier: Apache-2.0
"""ServerHeartbeats: a hung server stops no heartbeat to the others, and errors name it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tests.ps.serving import opened, plan

from fleetlight.errors import DeadlineError, PeerLostError
from fleetlight.ps import messages as m
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport.channel import SocketChannel, connect_all
from fleetlight.ps.transport.interface import (
    DEFAULT_RETRY,
    Connection,
    ReceivedReply,
    Reply,
    RetryPolicy,
)
from fleetlight.ps.transport.listener import Listener
from fleetlight.ps.worker import served_group
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.connections import CONTROL, PUSH, ServerHeartbeats
from fleetlight.ps.worker.served_group import ServedGroup
from fleetlight.wire.control_signals import NO_SIGNAL, WorkerSignals

LIMIT_S = 20.0


class ScriptedChannel:
    """A channel that replies on demand and records the steps it receives."""

    welcome = None
    retry = DEFAULT_RETRY

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.received: list[int] = []
        self.hangs = self.owes_reply = False
        self.error: Exception | None = None
        self.reply: m.Message = m.Done()

    def send(self, message: Any, arrays: Sequence[Any] = ()) -> None:
        assert not self.owes_reply, "one request in flight per channel"
        if self.error is not None:
            raise self.error
        self.received.append(message.step)
        self.owes_reply = True

    def expect(self, deadline_s: float | None = None) -> None:
        raise AssertionError("would wait")

    def reopen(self, limit_s: float) -> bool:
        return self.retry.restarts and self.error is None

    def has_reply(self, within_s: float) -> bool:
        return not self.hangs

    def receive(self, deadline_s: float | None = None) -> ReceivedReply:
        assert not self.hangs, "would wait"
        self.owes_reply = False
        return ReceivedReply(self.reply, [])

    def call(self, *_: Any) -> ReceivedReply:
        raise AssertionError("would wait")

    def close(self) -> None:
        """Do nothing."""


def test_a_server_that_owes_a_reply_gets_no_heartbeat() -> None:
    channels = [ScriptedChannel(f"server {n}") for n in range(3)]
    heartbeats = ServerHeartbeats(channels, WorkerSignals())
    channels[1].hangs = True
    for step in range(3):
        heartbeats.send(step)
    assert [channel.received for channel in channels] == [[0, 1, 2], [0], [0, 1, 2]]
    assert list(heartbeats.late()) == [1]
    assert heartbeats.collect() == [0, 2]
    channels[1].hangs = False
    heartbeats.send(3)
    assert [channel.received for channel in channels] == [[0, 1, 2, 3], [0, 3], [0, 1, 2, 3]]
    assert heartbeats.late() == {}


def test_a_lost_server_gets_no_more_heartbeats() -> None:
    channels = [ScriptedChannel("server 0"), ScriptedChannel("server 1")]
    heartbeats = ServerHeartbeats(channels, WorkerSignals())
    channels[0].error = PeerLostError("server 0 is gone")
    heartbeats.send(0)
    channels[0].error = None
    heartbeats.send(1)
    assert [channel.received for channel in channels] == [[], [0, 1]]
    channels[1].error = PeerLostError("server 1 is gone")
    with pytest.raises(PeerLostError, match="is gone"):
        heartbeats.send(2)


def test_a_restarted_server_gets_heartbeats_again() -> None:
    channels = [ScriptedChannel("server 0"), ScriptedChannel("server 1")]
    for channel in channels:
        channel.retry = RetryPolicy(0.0, restarts=True)
        channel.error = PeerLostError(f"{channel.peer} is gone")
    heartbeats = ServerHeartbeats(channels, WorkerSignals())
    # no server is reachable yet
    heartbeats.send(0)
    channels[1].error = None
    heartbeats.send(1)
    channels[0].error = None
    heartbeats.send(2)
    assert [channel.received for channel in channels] == [[2], [1, 2]]


def test_active_workers_are_unknown_until_server_0_replies() -> None:
    channels = [ScriptedChannel("server 0"), ScriptedChannel("server 1")]
    heartbeats = ServerHeartbeats(channels, WorkerSignals())
    channels[0].reply, channels[1].reply = (
        m.HeartbeatAck(NO_SIGNAL, 3),
        m.HeartbeatAck(NO_SIGNAL, 2),
    )
    channels[0].hangs = True
    heartbeats.send(0)
    heartbeats.collect()
    assert heartbeats.active_workers is None
    channels[0].hangs = False
    heartbeats.collect()
    assert heartbeats.active_workers == 3


class HangingServer:
    """A server that hangs on demand."""

    def __init__(self, server: Server) -> None:
        self.inner = server
        self.hung, self.over = threading.Event(), threading.Event()

    def __call__(self, connection: Connection, message: m.Message, arrays: Sequence[Any]) -> Reply:
        if self.hung.is_set():
            assert self.over.wait(3 * LIMIT_S)
        return self.inner(connection, message, arrays)

    def gone(self, connection: Connection, error: Any) -> None:
        self.inner.gone(connection, error)


@contextlib.contextmanager
def job(
    hangs: int, silence_s: float, deadline_s: float
) -> Iterator[tuple[Client, list[HangingServer]]]:
    """A worker and two servers, of which one hangs; `silence_s` is how long servers wait."""
    the_plan = plan("async", workers=1, server_num=2)
    servers = [HangingServer(opened(the_plan, silence_s, index=i)) for i in range(2)]
    listeners = [Listener(("127.0.0.1", 0), server) for server in servers]

    def connect(lane: str) -> Sequence[SocketChannel]:
        known = lane if lane in (CONTROL, PUSH) else "pull"
        channels = [
            SocketChannel(
                lambda listener=listener: listener.address,  # type: ignore[misc]
                f"server {i}",
                deadline_s=deadline_s,
                greeting=lambda i=i: m.Greeting("test", 0, 1, i, 2, 1, known),  # type: ignore[misc]
            )
            for i, listener in enumerate(listeners)
        ]
        connect_all(channels, LIMIT_S)
        return channels

    client = Client(0, 1, 2, connect)
    try:
        client.join(the_plan)
        yield client, servers
    finally:
        servers[hangs].over.set()
        client.close()
        for listener in listeners:
            listener.stop()


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [0, 1])
def test_a_hung_server_is_named_and_the_other_keeps_its_worker(
    hangs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_group, "_HEARTBEAT_S", 0.05)
    errors: list[Exception] = []

    def watch(server: Server) -> None:
        try:
            server.wait()
        except PeerLostError as error:
            errors.append(error)

    with job(hangs, silence_s=2.0, deadline_s=5.0) as (client, servers):
        watcher = threading.Thread(target=watch, args=(servers[1 - hangs].inner,))
        watcher.start()
        group = ServedGroup(client, LIMIT_S)
        servers[hangs].hung.set()
        with pytest.raises(
            DeadlineError, match=rf"^server {hangs} \(127.* was silent for"
        ) as error:
            client.everywhere(m.Join(plan("async", workers=1, server_num=2)))
        assert not errors
        group.fail(str(error.value))
        watcher.join(LIMIT_S)
    assert f"worker 0 failed: server {hangs} (127" in str(errors[0])


def test_a_timeout_names_the_hung_server_not_the_waiting_one() -> None:
    """Server 0 only knows that worker 1 is missing, not that it waits at server 1."""
    channels = [ScriptedChannel("server 0"), ScriptedChannel("server 1")]
    client = Client(0, 2, 2, lambda _: channels)
    channels[1].hangs = True
    for step in range(2):
        client.heartbeat(step)
    late = DeadlineError("server 0: barrier waited 6 s for worker 1")
    cause = client._cause({0: late})
    assert isinstance(cause, DeadlineError)
    assert "no heartbeat reply from server 1 (silent for 0 s); meanwhile server 0" in str(cause)
    silent = DeadlineError("server 1 was silent")
    assert client._cause({0: late, 1: silent}) is silent
    other = ValueError("what is wrong with the request itself")
    assert client._cause({0: other}) is other
    channels[1].hangs = False
    client.heartbeat(2)
    assert client._cause({0: late}) is late
