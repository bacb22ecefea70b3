# SPDX-License-Identifier: Apache-2.0
"""Connections of a worker: lost, broken, shared with the group of workers."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.ps.serving import DIM, closed_server, opened, plan, together

from fleetlight.errors import ConfigError, DeadlineError, PeerLostError, ProtocolError, StoppedError
from fleetlight.kernels import dedup
from fleetlight.ps import messages as m
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport.channel import SocketChannel, connect_all
from fleetlight.ps.transport.interface import (
    DEFAULT_RETRY,
    Connection,
    MemoryChannel,
    ReceivedReply,
    Reply,
    RetryPolicy,
)
from fleetlight.ps.transport.listener import Listener
from fleetlight.ps.update import TableGradients
from fleetlight.ps.worker import client, served_group
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.connections import CONTROL, PUSH, ServerHeartbeats
from fleetlight.ps.worker.reply_values import Wanted
from fleetlight.ps.worker.served_group import ServedGroup
from fleetlight.wire.control_signals import NO_SIGNAL, WorkerSignals

# ServedGroup: collective operations of workers over server 0.


LIMIT_S = 20.0


def groups_of(workers: int, deadline_s: float = 20.0) -> tuple[Server, list[ServedGroup]]:
    server = closed_server(workers, deadline_s)

    def member(index: int) -> ServedGroup:
        def connect(lane: str) -> list[Any]:
            channel = MemoryChannel(server)
            channel.call(m.Greeting("test", index, workers, 0, 1, 1, lane))
            return [channel]

        return ServedGroup(Client(index, workers, 1, connect), deadline_s)

    return server, [member(index) for index in range(workers)]


def in_all_workers(operation: Callable[[ServedGroup], Any], workers: int = 3) -> list[Any]:
    """The result of `operation` in each worker."""
    _, members = groups_of(workers)
    results = together(*[lambda group=group: operation(group) for group in members])
    for group in members:
        group.leave()
    return results


def test_bytes_and_tensors_are_gathered_in_order() -> None:
    gathered = in_all_workers(lambda c: c.gather_bytes(b"x" * c.index, "names"))
    assert gathered == [[b"", b"x", b"xx"]] * 3
    first = in_all_workers(lambda c: c.bytes_to_first(b"x" * c.index, "names"))
    assert first == [[b"", b"x", b"xx"], [], []]
    tensors = in_all_workers(lambda c: c.all_gather(torch.tensor([[c.index, 7]])))
    assert [[t.tolist() for t in tensors] for tensors in tensors] == [
        [[[0, 7]], [[1, 7]], [[2, 7]]]
    ] * 3
    empty = in_all_workers(lambda c: c.all_gather(torch.empty(0, 4)))
    assert [tuple(t.shape) for t in empty[1]] == [(0, 4)] * 3


@pytest.mark.parametrize(("op", "expected"), [("sum", 3), ("max", 2), ("min", 0)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bfloat16, torch.float64])
def test_tensors_are_reduced_in_place(op: str, expected: int, dtype: torch.dtype) -> None:
    for tensor in in_all_workers(lambda c: c.all_reduce(torch.tensor([c.index], dtype=dtype), op)):
        assert tensor.dtype == dtype
        assert tensor.tolist() == [expected]


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ConfigError, match="got op='mean', expected one of sum, max, min"):
        groups_of(1)[1][0].all_reduce(torch.ones(1), "mean")


def test_broadcast_sends_the_values_of_worker_0() -> None:
    def operation(group: ServedGroup) -> Any:
        tensors = [torch.full((2, 2), group.index, dtype=torch.bfloat16), torch.tensor(group.index)]
        group.broadcast(tensors, "buffers")
        return [t.float().sum().item() for t in tensors], group.broadcast_bytes(
            str(group.index).encode(), "names"
        )

    assert in_all_workers(operation) == [([0.0, 0.0], b"0")] * 3


def test_a_failure_of_one_worker_is_raised_on_all() -> None:
    def operation(group: ServedGroup) -> str:
        def fail() -> None:
            raise ConfigError("no such folder")

        try:
            group.together(fail if group.index == 1 else None, "save")
        except ConfigError as error:
            return str(error)
        return "no error"

    zero, one, two = in_all_workers(operation)
    assert one == "no such folder"
    assert zero == two
    assert "no such folder" in zero
    assert "on worker 1" in zero
    assert in_all_workers(lambda group: group.together(None, "save")) == [None] * 3


def test_different_calls_are_an_error_that_names_both() -> None:
    def operation(group: ServedGroup) -> Any:
        group.barrier() if group.index == 0 else group.assemble("save_persistables")

    for error in in_all_workers(operation, 2):
        assert isinstance(error, ProtocolError)
        assert "barrier" in str(error)
        assert "save_persistables" in str(error)


def test_a_barrier_timeout_names_the_missing_worker() -> None:
    _, [zero, one] = groups_of(2, deadline_s=0.2)
    with pytest.raises(DeadlineError, match=r"epoch waited 0\.2 s for worker 1"):
        zero.barrier("epoch")
    for group in (zero, one):
        group.fail("over")


def test_a_worker_left_alone_by_a_stop_calls_its_hook() -> None:
    _, [zero, one] = groups_of(2)
    done: list[str] = []
    zero.when_left_alone = lambda error: done.append(type(error).__name__)
    one.client.signals.stops = True
    one.client.heartbeat(0)
    with pytest.raises(StoppedError, match="barrier would wait for worker 1, which stops"):
        zero.barrier()
    assert done == ["StoppedError"]
    for group in (zero, one):
        group.fail("over")


def test_other_workers_receive_the_reason_of_a_failure() -> None:
    _, [zero, one] = groups_of(2)
    waiting = threading.Thread(target=one.fail, args=("KeyError: 'x'",))
    waiting.start()
    with pytest.raises(PeerLostError, match="worker 1 failed: KeyError: 'x'"):
        zero.barrier()
    waiting.join()
    zero.fail("")


def test_other_workers_learn_of_a_lost_connection() -> None:
    _, [zero, one] = groups_of(2)
    lost = threading.Thread(target=one.client.close)
    lost.start()
    with pytest.raises(PeerLostError, match="worker 1"):
        zero.barrier()
    lost.join()
    zero.fail("")


def test_a_single_worker_sends_no_request() -> None:
    server, [group] = groups_of(1)
    server.close("no request expected")
    assert group.alone
    assert group.gather_bytes(b"a", "names") == [b"a"]
    tensor = torch.ones(2)
    assert group.all_gather(tensor)[0] is not tensor
    assert group.all_reduce(tensor) is tensor
    group.broadcast([tensor], "buffers")
    group.barrier()
    assert copy.deepcopy(group) is group
    group.fail("")


def test_heartbeats_continue_during_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that take no part in the barrier receive nothing else."""
    monkeypatch.setattr("fleetlight.ps.worker.served_group._HEARTBEAT_S", 0.001)
    server, [zero, one] = groups_of(2)
    received, in_barrier = threading.Event(), threading.Event()
    enter, at_step = server._membership.barriers.enter, server._presence.at_step

    def notify(*of: Any) -> None:
        in_barrier.set()
        enter(*of)

    def receive(worker: int, step: int) -> None:
        at_step(worker, step)
        if worker == 0 and in_barrier.is_set():
            received.set()

    monkeypatch.setattr(server._membership.barriers, "enter", notify)
    monkeypatch.setattr(server._presence, "at_step", receive)
    waiting = threading.Thread(target=zero.barrier)
    waiting.start()
    assert in_barrier.wait(20)
    received.clear()
    assert received.wait(20)
    one.barrier()
    waiting.join()
    for group in (zero, one):
        group.leave()


def test_heartbeats_carry_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlight.ps.worker.served_group._HEARTBEAT_S", 0.001)
    server, [group] = groups_of(1)
    received = threading.Event()
    at_step = server._presence.at_step

    def receive(worker: int, step: int) -> None:
        at_step(worker, step)
        if step == 5:
            received.set()

    monkeypatch.setattr(server._presence, "at_step", receive)
    group.step = 5
    assert received.wait(20)
    group.leave()
    group._heartbeats.join(20)
    assert not group._heartbeats.is_alive()


@pytest.mark.parametrize("restarts", [True, False])
def test_heartbeats_continue_while_a_server_may_restart(
    restarts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_group, "_HEARTBEAT_S", 0.01)
    started, repeated = threading.Event(), threading.Event()
    _, [group] = groups_of(1)
    if restarts:
        group.client.expect_restarts(LIMIT_S)
    attempts: list[int] = []

    def beat(client: Client, step: int) -> None:
        if started.is_set():
            attempts.append(step)
            if len(attempts) > 1:
                repeated.set()
            raise DeadlineError("server 0 was silent for 0.5 s")

    monkeypatch.setattr(Client, "heartbeat", beat)
    started.set()
    if restarts:
        assert repeated.wait(LIMIT_S)
        # no server will return
        group.client.close()
    group._heartbeats.join(LIMIT_S)
    assert not group._heartbeats.is_alive()
    assert (len(attempts) > 1) == restarts


# ServerHeartbeats: a hung server stops no heartbeat to the others, and errors name it.


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


# A connection that breaks between two chunks of an exchange: each difference is added once.


SERVERS, ROWS, STEPS, BREAK_LIMIT_S = 2, 40, 6, 20.0


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
            assert self.server.answered.wait(BREAK_LIMIT_S)
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
def breaking_job(when: str) -> Iterator[tuple[Client, list[BreakingChannel], list[CountingServer]]]:
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
                deadline_s=BREAK_LIMIT_S,
                greeting=lambda i=i: m.Greeting("test", 0, 1, i, SERVERS, 1, known),  # type: ignore[misc]
            )
            for i, listener in enumerate(listeners)
        ]
        connect_all(channels, BREAK_LIMIT_S)
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
    with breaking_job(when) as (worker, channels, counting):
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
