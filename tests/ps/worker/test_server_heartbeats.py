# SPDX-License-Identifier: Apache-2.0
"""A server that hangs keeps no sign of life from the others, and is the one that is blamed."""

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
from fleetlight.ps.worker import served_group as group_module
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.connections import CONTROL, PUSH
from fleetlight.ps.worker.served_group import ServedGroup
from fleetlight.ps.worker.server_heartbeats import ServerHeartbeats
from fleetlight.wire.control_signals import NO_SIGNAL, WorkerSignals

LIMIT_S = 20.0


class Scripted:
    """A channel that answers when it is told to, and remembers the steps it heard."""

    welcome = None
    retry = DEFAULT_RETRY

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.heard: list[int] = []
        self.hangs = self.owes = False
        self.error: Exception | None = None
        self.answer: m.Message = m.Done()

    def send(self, message: Any, arrays: Sequence[Any] = ()) -> None:
        assert not self.owes, "one request in flight per channel"
        if self.error is not None:
            raise self.error
        self.heard.append(message.step)
        self.owes = True

    def expect(self, deadline_s: float | None = None) -> None:
        raise AssertionError("would wait")

    def reopen(self, limit_s: float) -> bool:
        return self.retry.restarts and self.error is None

    def has_reply(self, within_s: float) -> bool:
        return not self.hangs

    def receive(self, deadline_s: float | None = None) -> ReceivedReply:
        assert not self.hangs, "would wait"
        self.owes = False
        return ReceivedReply(self.answer, [])

    def call(self, *_: Any) -> ReceivedReply:
        raise AssertionError("would wait")

    def close(self) -> None:
        """Nothing to do."""


def test_who_owes_an_answer_is_left_out_until_it_gives_it() -> None:
    channels = [Scripted(f"server {n}") for n in range(3)]
    signs = ServerHeartbeats(channels, WorkerSignals())
    channels[1].hangs = True
    for step in range(3):
        signs.send(step)
    assert [channel.heard for channel in channels] == [[0, 1, 2], [0], [0, 1, 2]]
    assert list(signs.late()) == [1]
    assert signs.collect() == [0, 2]
    channels[1].hangs = False
    signs.send(3)
    assert [channel.heard for channel in channels] == [[0, 1, 2, 3], [0, 3], [0, 1, 2, 3]]
    assert signs.late() == {}


def test_a_server_that_is_gone_is_asked_no_more() -> None:
    channels = [Scripted("server 0"), Scripted("server 1")]
    signs = ServerHeartbeats(channels, WorkerSignals())
    channels[0].error = PeerLostError("server 0 is gone")
    signs.send(0)
    channels[0].error = None
    signs.send(1)
    assert [channel.heard for channel in channels] == [[], [0, 1]]
    channels[1].error = PeerLostError("server 1 is gone")
    with pytest.raises(PeerLostError, match="is gone"):
        signs.send(2)


def test_a_server_that_comes_back_is_told_again() -> None:
    channels = [Scripted("server 0"), Scripted("server 1")]
    for channel in channels:
        channel.retry = RetryPolicy(0.0, restarts=True)
        channel.error = PeerLostError(f"{channel.peer} is gone")
    signs = ServerHeartbeats(channels, WorkerSignals())
    # there is nobody to hear it, but there will be
    signs.send(0)
    channels[1].error = None
    signs.send(1)
    channels[0].error = None
    signs.send(2)
    assert [channel.heard for channel in channels] == [[2], [1, 2]]


def test_how_many_are_here_is_unknown_until_server_0_has_told_it() -> None:
    channels = [Scripted("server 0"), Scripted("server 1")]
    signs = ServerHeartbeats(channels, WorkerSignals())
    channels[0].answer, channels[1].answer = (
        m.HeartbeatAck(NO_SIGNAL, 3),
        m.HeartbeatAck(NO_SIGNAL, 2),
    )
    channels[0].hangs = True
    signs.send(0)
    signs.collect()
    assert signs.active_workers is None
    channels[0].hangs = False
    signs.collect()
    assert signs.active_workers == 3


class Hanging:
    """A server that answers nothing once it is told to hang."""

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
def job(hangs: int, silence_s: float, deadline_s: float) -> Iterator[tuple[Client, list[Hanging]]]:
    """A worker and two servers; servers lose who is silent that long, the worker waits longer."""
    the_plan = plan("async", workers=1, server_num=2)
    desks = [Hanging(opened(the_plan, silence_s, index=i)) for i in range(2)]
    listeners = [Listener(("127.0.0.1", 0), desk) for desk in desks]

    def connect(lane: str) -> Sequence[SocketChannel]:
        known = lane if lane in (CONTROL, PUSH) else "pull"
        channels = [
            SocketChannel(
                listener.address,
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
        yield client, desks
    finally:
        desks[hangs].over.set()
        client.close()
        for listener in listeners:
            listener.stop()


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [0, 1])
def test_a_hung_server_is_named_and_the_other_keeps_its_worker(
    hangs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "_HEARTBEAT_S", 0.05)
    told: list[Exception] = []

    def watch(server: Server) -> None:
        try:
            server.wait()
        except PeerLostError as error:
            told.append(error)

    with job(hangs, silence_s=1.5, deadline_s=3.5) as (client, desks):
        watcher = threading.Thread(target=watch, args=(desks[1 - hangs].inner,))
        watcher.start()
        crew = ServedGroup(client, LIMIT_S)
        desks[hangs].hung.set()
        with pytest.raises(
            DeadlineError, match=rf"^server {hangs} \(127.* was silent for"
        ) as found:
            client.everywhere(m.Join(plan("async", workers=1, server_num=2)))
        assert not told
        crew.fail(str(found.value))
        watcher.join(LIMIT_S)
    assert f"worker 0 failed: server {hangs} (127" in str(told[0])


def test_who_waits_for_the_innocent_is_told_of_the_server_that_hangs() -> None:
    """Server 0 only knows that worker 1 does not come, not that it waits at server 1."""
    channels = [Scripted("server 0"), Scripted("server 1")]
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
