# SPDX-License-Identifier: Apache-2.0
"""A channel over sockets: dialing, options, frames, deadlines."""

import concurrent.futures
import contextlib
import errno
import itertools
import math
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from tests.ps.transport.doubles import (
    LIMIT_S,
    PULL,
    RecordingHandler,
    connected,
    listening,
    received,
    scripted,
)

from fleetlight.errors import (
    DeadlineError,
    MembershipError,
    PeerLostError,
    PlanError,
    ProtocolError,
)
from fleetlight.launch.processes.ports import Reservation
from fleetlight.ps import messages as m
from fleetlight.ps.transport import (
    Channel,
    Connection,
    Listener,
    MemoryChannel,
    SocketChannel,
    connect_all,
    dialing,
)
from fleetlight.ps.transport.frames import _EARLY_BYTES, _KEEP_BYTES, _WORTH_BYTES, Frames, _Memory
from fleetlight.ps.transport.interface import RetryPolicy
from fleetlight.ps.transport.protocol import PREFIX_BYTES, MessageCodec
from fleetlight.ps.transport.socket_options import family, is_itself
from fleetlight.roles.role import Endpoint
from fleetlight.wire.plain import Wire

# SocketChannel: retries at the start, deadlines, and repetition after a broken connection.


def at(held: Reservation) -> Callable[[], Endpoint]:
    """Say that the server listens at a reserved port."""
    return lambda: ("127.0.0.1", held.port)


def reset(raw: socket.socket) -> None:
    """Close the connection like a killed process with unread bytes."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_arrays_round_trip() -> None:
    with listening(RecordingHandler()) as server, connected(server.address) as channel:
        sent = [np.arange(5), np.zeros((0, 3), np.float32), np.array(2.5)]
        reply = channel.call(PULL, sent)
        assert reply.message == m.Pulled(1, 1)
        for sent_array, got in zip(sent, reply.arrays, strict=True):
            np.testing.assert_array_equal(sent_array, got)


@pytest.mark.slow
def test_large_and_many_small_arrays_round_trip() -> None:
    with listening(RecordingHandler()) as server, connected(server.address) as channel:
        channel.call(m.Heartbeat(0))
        large = np.arange(8 << 20, dtype=np.int64)
        np.testing.assert_array_equal(channel.call(PULL, [large]).arrays[0], large)
        # more buffers than one system call accepts
        small = [np.full(3, n % 256, np.uint8) for n in range(1500)]
        got = channel.call(PULL, small).arrays
        assert [a.tolist() for a in got] == [a.tolist() for a in small]


def test_several_servers_are_asked_before_replies_are_awaited() -> None:
    barrier = threading.Barrier(2, timeout=LIMIT_S)
    handlers = [RecordingHandler(), RecordingHandler()]
    for handler in handlers:
        handler.on_ask = lambda connection: barrier.wait()
    with (
        listening(handlers[0]) as one,
        listening(handlers[1]) as two,
        connected(one.address) as first,
        connected(two.address) as second,
    ):
        first.send(m.MetricsRequest())
        second.send(m.MetricsRequest())
        assert first.receive().message == second.receive().message == m.Done()


def test_a_reply_stays_valid_after_later_replies() -> None:
    with listening(RecordingHandler()) as server, connected(server.address) as channel:
        channel.call(PULL)
        replies = [channel.call(PULL, [np.full(40_000, n)]).arrays[0] for n in range(5)]
        assert [int(a.min()) for a in replies] == [int(a.max()) for a in replies] == [*range(5)]


def test_a_failure_is_raised_as_the_class_it_names() -> None:
    handler = RecordingHandler()
    with listening(handler) as server, connected(server.address) as channel:
        handler.error = PlanError("table t has dim 8 here")
        with pytest.raises(PlanError, match=r"server 0 \(127.0.0.1:\d+\): table t has dim 8 here"):
            channel.call(m.Heartbeat(1))
        handler.error = None
        assert channel.call(m.Heartbeat(2)).message == m.Done()


def test_a_silent_server_raises_a_deadline_error() -> None:
    release = threading.Event()
    handler = RecordingHandler()
    handler.on_ask = lambda connection: release.wait(LIMIT_S) and None
    with listening(handler) as server, connected(server.address) as channel:
        text = r"server 0 \(127.0.0.1:\d+\) was silent for \d+\.\d s during metrics"
        with pytest.raises(DeadlineError, match=text):
            channel.call(m.MetricsRequest(), deadline_s=0.1)
        release.set()
        # the late reply is not taken for that of the next request
        assert channel.call(PULL).message == m.Pulled(1, 1)


def test_a_server_that_does_not_read_is_silent_too() -> None:
    released = threading.Event()
    with (
        scripted(lambda raw, frames: released.wait(LIMIT_S)) as address,
        connected(address, deadline_s=0.2) as channel,
    ):
        with pytest.raises(DeadlineError, match=r"was silent for .* during pull"):
            channel.send(PULL, [np.zeros(64 << 20, np.uint8)])
        released.set()


def test_only_idempotent_requests_may_be_repeated() -> None:
    for policy in (RetryPolicy(1.0), RetryPolicy(1.0, restarts=True)):
        assert policy.may_repeat(PULL, tries=1)
        assert not policy.may_repeat(m.Save("", "", 0), tries=1)
    assert not RetryPolicy(1.0).may_repeat(PULL, tries=2)
    assert RetryPolicy(1.0, restarts=True).may_repeat(PULL, tries=9)
    assert not RetryPolicy(0.0, restarts=True).may_repeat(PULL, tries=1)


@pytest.mark.parametrize("how", [lambda raw: None, reset], ids=["closed", "reset"])
def test_a_pull_is_repeated_with_its_number_after_a_new_greeting(how: object) -> None:
    numbers, incarnations = [], []

    def take_and_hang_up(raw: socket.socket, frames: Frames) -> None:
        welcome(frames)
        numbers.append(received(frames).request)
        how(raw)  # type: ignore[operator]

    def send_reply(raw: socket.socket, frames: Frames) -> None:
        welcome(frames)
        frame = received(frames)
        numbers.append(frame.request)
        frames.send(frame.request, m.Pulled(3, 3), frame.arrays, "a reply")

    def welcome(frames: Frames) -> None:
        frame = received(frames)
        assert isinstance(frame.message, m.Heartbeat)
        incarnations.append(frame.message.step)
        frames.send(frame.request, m.Done(), (), "a reply")

    with (
        scripted(take_and_hang_up, send_reply) as address,
        connected(address, greeting=lambda: m.Heartbeat(len(incarnations))) as channel,
    ):
        reply = channel.call(PULL, [np.arange(3)])
        assert reply.message == m.Pulled(3, 3)
        assert reply.arrays[0].tolist() == [0, 1, 2]
    assert numbers[0] == numbers[1]
    assert incarnations == [0, 1]


def test_a_request_is_repeated_after_each_crash_of_a_server() -> None:
    numbers = []

    def crash(raw: socket.socket, frames: Frames) -> None:
        numbers.append(received(frames).request)

    def send_reply(raw: socket.socket, frames: Frames) -> None:
        crash(raw, frames)
        frames.send(numbers[-1], m.Pulled(3, 3), [], "a reply")

    retry = RetryPolicy(LIMIT_S, restarts=True)
    with (
        scripted(crash, crash, crash, send_reply) as address,
        connected(address, retry=retry) as channel,
    ):
        assert channel.call(PULL).message == m.Pulled(3, 3)
    assert len(numbers) == 4
    assert len(set(numbers)) == 1


def test_reopen_tries_a_missing_server_once() -> None:
    handler = RecordingHandler()
    retry = RetryPolicy(0.0, restarts=True)
    with listening(handler) as server, connected(server.address, retry=retry) as channel:
        handler.on_ask = lambda connection: connection.close()
        with pytest.raises(PeerLostError):
            channel.call(m.MetricsRequest())
        assert channel.reopen(LIMIT_S)
        assert channel.call(PULL).message == m.Pulled(1, 1)
        server.stop()
        assert not channel.reopen(0.1)
        channel.close()
        assert not channel.reopen(0.1)


def test_a_server_without_a_welcome_counts_as_missing() -> None:
    finished = threading.Event()

    def crash(raw: socket.socket, frames: Frames) -> None:
        frames.receive("a greeting")
        frames.send(1, m.Done(), [], "a welcome")

    def hang(raw: socket.socket, frames: Frames) -> None:
        finished.wait(LIMIT_S)

    with scripted(crash, hang) as address:
        channel = SocketChannel(
            lambda: address,
            "server 0",
            # far longer than this test may run
            deadline_s=1e6,
            greeting=lambda: m.Heartbeat(0),
            retry=RetryPolicy(0.0, restarts=True),
        )
        connect_all([channel], LIMIT_S)
        assert not channel.reopen(0.1)
        finished.set()
        channel.close()


def test_a_request_that_may_not_be_repeated_is_lost() -> None:
    def take_and_hang_up(raw: socket.socket, frames: Frames) -> None:
        frames.receive("a request")

    with scripted(take_and_hang_up) as address, connected(address) as channel:
        text = r"lost server 0 \(127.0.0.1:\d+\) during save: it closed the connection"
        with pytest.raises(PeerLostError, match=text):
            channel.call(m.Save("f", "t", 1))


def test_a_lost_server_is_named_after_reconnecting_fails() -> None:
    handler = RecordingHandler()
    with listening(handler) as server, connected(server.address, retry=RetryPolicy(0.3)) as channel:
        channel.call(PULL)
        server.stop()
        with pytest.raises(PeerLostError, match=r"lost server 0 .* during pull.*not ready within"):
            channel.call(PULL)


def test_an_end_inside_a_frame_is_a_lost_peer() -> None:
    def send_half_a_reply(raw: socket.socket, frames: Frames) -> None:
        assert frames.receive("a request") is not None
        raw.sendall(b"\xf1EET\x01\x00\x00")

    with (
        scripted(send_half_a_reply) as address,
        connected(address, retry=RetryPolicy(0)) as channel,
        pytest.raises(PeerLostError, match="in the middle of a frame"),
    ):
        channel.call(PULL)


def test_a_reply_to_another_request_is_refused() -> None:
    def reply_to_another_request(raw: socket.socket, frames: Frames) -> None:
        frames.receive("a request")
        frames.send(77, m.Done(), (), "a reply")

    with (
        scripted(reply_to_another_request) as address,
        connected(address) as channel,
        pytest.raises(ProtocolError, match=r"server 0 .* answered request 77, expected 1"),
    ):
        channel.call(PULL)


def test_a_garbage_reply_is_a_protocol_error_of_its_server() -> None:
    def send_http(raw: socket.socket, frames: Frames) -> None:
        raw.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with (
        scripted(send_http) as address,
        connected(address) as channel,
        pytest.raises(ProtocolError, match=r"server 0 \(127.*got an HTTP answer"),
    ):
        channel.call(PULL)


def test_a_refusal_during_a_send_is_received() -> None:
    def refuse(raw: socket.socket, frames: Frames) -> None:
        frames.send(0, m.Failure("MembershipError", "worker 5 is not of this job"), (), "a refusal")

    with (
        scripted(refuse) as address,
        connected(address, retry=RetryPolicy(0)) as channel,
        pytest.raises(MembershipError, match=r"server 0 .*: worker 5 is not of this job"),
    ):
        channel.call(PULL, [np.zeros(256 << 20, np.uint8)])


def test_a_refused_greeting_is_not_retried() -> None:
    handler = RecordingHandler()
    handler.error = MembershipError("the job has only 2 workers")
    with listening(handler) as server, pytest.raises(MembershipError, match="only 2 workers"):
        SocketChannel.connect(
            server.address, "server 0", deadline_s=LIMIT_S, greeting=lambda: m.Heartbeat(0)
        )
    assert handler.seen == [m.Heartbeat(0)]


def test_a_silent_address_hints_at_another_program() -> None:
    hint = r"; expected a parameter server there, but another program may listen"
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(DeadlineError, match=hint):
        SocketChannel.connect(
            silent.getsockname()[:2], "server 0", deadline_s=0.3, greeting=lambda: m.Heartbeat(0)
        )


def test_servers_that_start_late_are_awaited_and_reported() -> None:
    reported: list[list[str]] = []
    started: list[Listener] = []
    reserved = [Reservation("127.0.0.1"), Reservation("127.0.0.1")]
    channels = [
        SocketChannel(at(held), f"server {n}", deadline_s=LIMIT_S)
        for n, held in enumerate(reserved)
    ]

    def start_the_next(missing: list[str]) -> None:
        reported.append(missing)
        started.append(Listener(("127.0.0.1", reserved[len(started)].port), RecordingHandler()))

    started.append(Listener(("127.0.0.1", reserved[0].port), RecordingHandler()))
    try:
        connect_all(channels, LIMIT_S, start_the_next)
        assert reported == [[f"server 1 (127.0.0.1:{reserved[1].port})"]]
        assert all(channel.call(PULL).message == m.Pulled(1, 1) for channel in channels)
    finally:
        for part in (*channels, *reserved):
            part.close()
        for server in started:
            server.stop()


def test_all_servers_that_never_start_are_named() -> None:
    reserved = [Reservation("127.0.0.1"), Reservation("127.0.0.1")]
    channels = [
        SocketChannel(at(held), f"server {n}", deadline_s=LIMIT_S)
        for n, held in enumerate(reserved)
    ]
    text = r"not ready within 0.2 s: server 0 .*refused; server 1 \(.*refused"
    with pytest.raises(DeadlineError, match=text):
        connect_all(channels, 0.2)
    for held in reserved:
        held.close()


def test_an_unknown_host_is_a_server_that_is_not_ready() -> None:
    with pytest.raises(DeadlineError, match=r"server 0 \(no-such-host.invalid:80\): \S"):
        SocketChannel.connect(("no-such-host.invalid", 80), "server 0", deadline_s=0.1)


def test_an_interrupted_wait_leaves_no_partial_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with listening(RecordingHandler()) as server, connected(server.address) as channel:
        monkeypatch.setattr(channel._frames, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            channel.call(PULL, [np.ones(3)])
        assert channel.call(PULL, [np.zeros(1)]).arrays[0].tolist() == [0.0]


def test_a_channel_may_be_closed_while_a_thread_waits() -> None:
    """The waiting thread gets an error and does not reconnect."""
    handler = RecordingHandler()
    asked, reply = threading.Event(), threading.Event()

    def hold(_: Connection) -> None:
        asked.set()
        assert reply.wait(LIMIT_S)

    handler.on_ask = hold
    with listening(handler) as server, connected(server.address) as channel:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(channel.call, m.MetricsRequest())
            assert asked.wait(LIMIT_S)
            channel.close()
            assert isinstance(waiting.exception(LIMIT_S), PeerLostError)
            reply.set()
        with pytest.raises(PeerLostError, match=r"server 0 .*closed before pull"):
            channel.call(PULL)
        with pytest.raises(PeerLostError, match="closed during connecting"):
            connect_all([channel], LIMIT_S)
    assert [type(message) for message in handler.seen] == [m.MetricsRequest]


def test_an_infinite_deadline_is_accepted() -> None:
    with (
        listening(RecordingHandler()) as server,
        connected(server.address, deadline_s=math.inf) as channel,
    ):
        assert channel.call(PULL).message == m.Pulled(1, 1)


# dial: a server that is not listening, or not any more.


def test_a_server_that_closes_at_once_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel then reports no peer for the new connection."""

    def not_connected(_: socket.socket) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(dialing, "prepare", not_connected)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = server.getsockname()
        with pytest.raises(dialing.NotReadyError, match="not connected"):
            dialing.dial(endpoint, "server 0", 2.0)


def test_a_refused_connection_is_not_ready() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(dialing.NotReadyError, match="refused"):
            dialing.dial(bound.getsockname(), "server 0", 2.0)


# MemoryChannel: behaves like a channel over a socket, within one process.


def test_arrays_are_passed_by_reference() -> None:
    channel: Channel = MemoryChannel(RecordingHandler())
    sent = np.arange(3)
    reply = channel.call(PULL, [sent])
    assert reply.message == m.Pulled(1, 1)
    assert reply.arrays[0] is sent


def test_errors_are_raised_unchanged() -> None:
    handler = RecordingHandler()
    handler.error = PlanError("no such table")
    channel = MemoryChannel(handler)
    with pytest.raises(PlanError) as caught:
        channel.call(m.Heartbeat(1))
    assert caught.value is handler.error
    handler.error = None
    assert channel.call(m.Heartbeat(2)).message == m.Done()


def test_the_handler_sees_one_end() -> None:
    handler = RecordingHandler()
    channel = MemoryChannel(handler)
    channel.call(m.Leave())
    channel.close()
    channel.close()
    assert handler.ends == [None]


def test_a_channel_has_one_request_in_flight() -> None:
    channel = MemoryChannel(RecordingHandler())
    channel.send(PULL)
    with pytest.raises(AssertionError, match="one request in flight"):
        channel.send(PULL)
    channel.receive()
    with pytest.raises(AssertionError, match="nothing was sent"):
        channel.receive()


# Socket options of a job's connections.


def test_both_ends_use_nodelay_and_keepalive() -> None:
    with listening(RecordingHandler()) as server, connected(server.address) as channel:
        channel.call(PULL)
        assert channel._frames is not None
        (session,) = server._sessions
        for raw in (channel._frames.wire._socket, session._accepted):
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not let us choose")
def test_the_loopback_uses_reno() -> None:
    with listening(RecordingHandler()) as server, connected(server.address) as channel:
        channel.call(PULL)
        assert channel._frames is not None
        (session,) = server._sessions
        for raw in (channel._frames.wire._socket, session._accepted):
            name = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert name.rstrip(b"\0") == b"reno"


def test_a_self_connected_socket_is_detected() -> None:
    with socket.socket() as alone:
        alone.bind(("127.0.0.1", 0))
        alone.connect(alone.getsockname())
        assert is_itself(alone)
    with listening(RecordingHandler()) as server, socket.create_connection(server.address) as pair:
        assert not is_itself(pair)


@pytest.mark.parametrize(
    ("host", "expected"), [("10.0.0.1", socket.AF_INET), ("fd00::1", socket.AF_INET6)]
)
def test_an_address_has_its_family(host: str, expected: socket.AddressFamily) -> None:
    assert family(host) is expected


# Frames: received whole from any pieces; receive memory is reused only when free.


SIZE = 4 * _WORTH_BYTES


def address(array: np.ndarray) -> int:  # type: ignore[type-arg]
    return int(array.__array_interface__["data"][0])


def test_free_memory_is_reused() -> None:
    memory = _Memory()
    first = address(memory.take(SIZE))
    assert address(memory.take(SIZE // 2)) == first


def test_memory_in_use_is_not_reused() -> None:
    memory = _Memory()
    view = memory.take(SIZE)[8:].view(np.float64)[:3]
    tensor = torch.from_numpy(memory.take(SIZE)[:16])
    places = {address(memory.take(SIZE)) for _ in range(5)}
    assert address(view) - 8 not in places
    assert tensor.data_ptr() not in places


def test_larger_memory_replaces_smaller_memory() -> None:
    memory = _Memory()
    for size in (SIZE, 2 * SIZE, 4 * SIZE):
        memory.take(size)
    assert [held.size for held in memory._held] == [4 * SIZE]


def test_a_caller_that_holds_a_reply_alternates_between_two_buffers() -> None:
    memory = _Memory()
    places = set()
    held = memory.take(SIZE)
    for _ in range(6):
        held = memory.take(SIZE)
        places.add(address(held))
    assert len(places) == 2


def test_very_large_and_very_small_memory_is_not_kept() -> None:
    memory = _Memory()
    for size in (_WORTH_BYTES - 1, _KEEP_BYTES + 1):
        memory.take(size)
    assert memory._held == []
    memory.take(SIZE)
    small = memory.take(SIZE // 8)
    assert small.base is None or len(small.base) < SIZE


#: shorter than one early read; with longer arrays; with a longer header
MESSAGES: list[tuple[m.Message, int]] = [
    (m.Heartbeat(7), 0),
    (m.Pull([m.TablePull(0, True)], dense=False), 3 * _EARLY_BYTES),
    (m.Leave("x" * 2 * _EARLY_BYTES), 5),
    (m.Heartbeat(8), 0),
]


def encoded() -> bytes:
    codec: MessageCodec[m.Message] = MessageCodec(m.Message)
    frames = [
        codec.encode(number, message, [np.arange(size, dtype=np.int64)] if size else [])
        for number, (message, size) in enumerate(MESSAGES)
    ]
    return b"".join(bytes(buffer) for frame in frames for buffer in frame)


@contextlib.contextmanager
def frames_pair(kind: type[Wire] = Wire) -> Iterator[tuple[socket.socket, Frames]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield theirs, Frames(kind(ours, "peer"), silence_s=20.0)


def read_all(frames: Frames) -> None:
    for number, (message, size) in enumerate(MESSAGES):
        frame = frames.receive("a test", start_s=20.0)
        assert frame is not None
        assert (frame.request, frame.message) == (number, message)
        assert [array.tolist() for array in frame.arrays] == ([list(range(size))] if size else [])


def test_frames_that_arrive_together_are_read_one_by_one() -> None:
    with frames_pair() as (peer, frames):
        peer.sendall(encoded())
        read_all(frames)
        peer.close()
        assert frames.receive("a test", start_s=20.0) is None


#: around the size of an early read, and around a prefix
SIZES = (1, PREFIX_BYTES - 1, PREFIX_BYTES, PREFIX_BYTES + 1, _EARLY_BYTES - 1, _EARLY_BYTES + 1)


@pytest.mark.parametrize("size", SIZES)
def test_frames_read_in_small_pieces_are_whole(size: int) -> None:
    class SlowWire(Wire):
        def _receive_some(self, into: memoryview) -> int:
            return super()._receive_some(into[:size])

        def _receive_all(self, into: memoryview) -> int:
            return super()._receive_all(into[:size])

    with frames_pair(SlowWire) as (peer, frames):
        peer.sendall(encoded() * 2)
        read_all(frames)
        read_all(frames)


def test_frames_sent_in_small_pieces_are_whole() -> None:
    def send_in_pieces(peer: socket.socket) -> None:
        data, sizes = encoded() * 3, itertools.cycle(SIZES)
        while data:
            count = peer.send(data[: next(sizes)])
            data = data[count:]

    with frames_pair() as (peer, frames):
        sender = threading.Thread(target=send_in_pieces, args=(peer,))
        sender.start()
        for _ in range(3):
            read_all(frames)
        sender.join(20)
        assert not sender.is_alive()


def test_a_partial_frame_at_the_end_is_an_error() -> None:
    with frames_pair() as (peer, frames):
        peer.sendall(encoded() + encoded()[:10])
        peer.close()
        read_all(frames)
        with pytest.raises(PeerLostError, match="in the middle of a frame"):
            frames.receive("a test", start_s=20.0)
