# SPDX-License-Identifier: Apache-2.0
"""Calling a server: retry at the start, deadlines, and one repetition after a break."""

from __future__ import annotations

import concurrent.futures
import math
import socket
import struct
import threading

import numpy as np
import pytest
from tests.ps.transport.doubles import LIMIT_S, PULL, Desk, connected, listening, scripted

from fleetlight.errors import (
    DeadlineError,
    MembershipError,
    PeerLostError,
    PlanError,
    ProtocolError,
)
from fleetlight.launch.processes.ports import Reservation
from fleetlight.ps.messages import Done, Failure, FiguresRequest, Heartbeat, Pulled, Save
from fleetlight.ps.transport import Connection, Listener, SocketChannel, connect_all
from fleetlight.ps.transport.frames import Frames
from fleetlight.ps.transport.interface import RetryPolicy


def reset(raw: socket.socket) -> None:
    """Close as a process does that was killed with unread bytes."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_arrays_there_and_back() -> None:
    with listening(Desk()) as server, connected(server.address) as channel:
        sent = [np.arange(5), np.zeros((0, 3), np.float32), np.array(2.5)]
        answer = channel.call(PULL, sent)
        assert answer.message == Pulled(1, 1)
        for mine, back in zip(sent, answer.arrays, strict=True):
            np.testing.assert_array_equal(mine, back)


def test_64_mib_and_many_small_arrays() -> None:
    with listening(Desk()) as server, connected(server.address) as channel:
        channel.call(Heartbeat(0))
        large = np.arange(8 << 20, dtype=np.int64)
        np.testing.assert_array_equal(channel.call(PULL, [large]).arrays[0], large)
        # more buffers than one system call takes
        small = [np.full(3, n % 256, np.uint8) for n in range(1500)]
        back = channel.call(PULL, small).arrays
        assert [a.tolist() for a in back] == [a.tolist() for a in small]


def test_answers_of_several_servers_are_awaited_after_all_were_asked() -> None:
    meet = threading.Barrier(2, timeout=LIMIT_S)
    desks = [Desk(), Desk()]
    for desk in desks:
        desk.on_ask = lambda connection: meet.wait()
    with (
        listening(desks[0]) as one,
        listening(desks[1]) as two,
        connected(one.address) as first,
        connected(two.address) as second,
    ):
        first.send(FiguresRequest())
        second.send(FiguresRequest())
        assert first.receive().message == second.receive().message == Done()


def test_an_answer_outlives_the_next_ones() -> None:
    with listening(Desk()) as server, connected(server.address) as channel:
        channel.call(PULL)
        answers = [channel.call(PULL, [np.full(40_000, n)]).arrays[0] for n in range(5)]
        assert [int(a.min()) for a in answers] == [int(a.max()) for a in answers] == [*range(5)]


def test_a_failure_is_raised_as_the_class_it_names() -> None:
    desk = Desk()
    with listening(desk) as server, connected(server.address) as channel:
        desk.error = PlanError("table t has dim 8 here")
        with pytest.raises(PlanError, match=r"server 0 \(127.0.0.1:\d+\): table t has dim 8 here"):
            channel.call(Heartbeat(1))
        desk.error = None
        assert channel.call(Heartbeat(2)).message == Done()


def test_silence_is_named_and_ends() -> None:
    release = threading.Event()
    desk = Desk()
    desk.on_ask = lambda connection: release.wait(LIMIT_S) and None
    with listening(desk) as server, connected(server.address) as channel:
        text = r"server 0 \(127.0.0.1:\d+\) was silent for 0\.\d s during figures"
        with pytest.raises(DeadlineError, match=text):
            channel.call(FiguresRequest(), deadline_s=0.1)
        release.set()
        # the late answer is not taken for that of the next request
        assert channel.call(PULL).message == Pulled(1, 1)


def test_a_server_that_takes_nothing_in_is_silent_too() -> None:
    released = threading.Event()
    with (
        scripted(lambda raw, frames: released.wait(LIMIT_S)) as address,
        connected(address, deadline_s=0.2) as channel,
    ):
        with pytest.raises(DeadlineError, match=r"was silent for .* during pull"):
            channel.send(PULL, [np.zeros(64 << 20, np.uint8)])
        released.set()


def test_what_may_be_repeated() -> None:
    for once in (RetryPolicy(1.0), RetryPolicy(1.0, restarts=True)):
        assert once.may_repeat(PULL, tries=1)
        assert not once.may_repeat(Save("", "", 0), tries=1)
    assert not RetryPolicy(1.0).may_repeat(PULL, tries=2)
    assert RetryPolicy(1.0, restarts=True).may_repeat(PULL, tries=9)
    assert not RetryPolicy(0.0, restarts=True).may_repeat(PULL, tries=1)


@pytest.mark.parametrize("how", [lambda raw: None, reset], ids=["closed", "reset"])
def test_a_pull_is_repeated_under_the_same_number_after_a_new_greeting(how: object) -> None:
    numbers, incarnations = [], []

    def take_and_hang_up(raw: socket.socket, frames: Frames) -> None:
        welcome(frames)
        frame = frames.receive("a request")
        assert frame is not None
        numbers.append(frame.request)
        how(raw)  # type: ignore[operator]

    def answer(raw: socket.socket, frames: Frames) -> None:
        welcome(frames)
        frame = frames.receive("a request")
        assert frame is not None
        numbers.append(frame.request)
        frames.send(frame.request, Pulled(3, 3), frame.arrays, "a reply")

    def welcome(frames: Frames) -> None:
        frame = frames.receive("a greeting")
        assert frame is not None
        assert isinstance(frame.message, Heartbeat)
        incarnations.append(frame.message.step)
        frames.send(frame.request, Done(), (), "a reply")

    with (
        scripted(take_and_hang_up, answer) as address,
        connected(address, greeting=lambda: Heartbeat(len(incarnations))) as channel,
    ):
        answered = channel.call(PULL, [np.arange(3)])
        assert answered.message == Pulled(3, 3)
        assert answered.arrays[0].tolist() == [0, 1, 2]
    assert numbers[0] == numbers[1]
    assert incarnations == [0, 1]


def test_a_server_that_comes_back_is_asked_as_often_as_it_dies() -> None:
    numbers = []

    def die(raw: socket.socket, frames: Frames) -> None:
        frame = frames.receive("a request")
        assert frame is not None
        numbers.append(frame.request)

    def answer(raw: socket.socket, frames: Frames) -> None:
        die(raw, frames)
        frames.send(numbers[-1], Pulled(3, 3), [], "a reply")

    retry = RetryPolicy(LIMIT_S, restarts=True)
    with (
        scripted(die, die, die, answer) as address,
        connected(address, retry=retry) as channel,
    ):
        assert channel.call(PULL).message == Pulled(3, 3)
    assert len(numbers) == 4
    assert len(set(numbers)) == 1


def test_a_server_that_is_away_may_be_tried_now_and_then() -> None:
    desk = Desk()
    retry = RetryPolicy(0.0, restarts=True)
    with listening(desk) as server, connected(server.address, retry=retry) as channel:
        desk.on_ask = lambda connection: connection.close()
        with pytest.raises(PeerLostError):
            channel.call(FiguresRequest())
        assert channel.reopen(LIMIT_S)
        assert channel.call(PULL).message == Pulled(1, 1)
        server.stop()
        assert not channel.reopen(0.1)
        channel.close()
        assert not channel.reopen(0.1)


def test_a_server_that_welcomes_nobody_is_away_for_now() -> None:
    over = threading.Event()

    def die(raw: socket.socket, frames: Frames) -> None:
        frames.receive("a greeting")
        frames.send(1, Done(), [], "a welcome")

    def hang(raw: socket.socket, frames: Frames) -> None:
        over.wait(LIMIT_S)

    with scripted(die, hang) as address:
        channel = SocketChannel(
            address,
            "server 0",
            # far longer than this test may take
            deadline_s=1e6,
            greeting=lambda: Heartbeat(0),
            retry=RetryPolicy(0.0, restarts=True),
        )
        connect_all([channel], LIMIT_S)
        assert not channel.reopen(0.1)
        over.set()
        channel.close()


def test_what_must_not_be_repeated_is_lost() -> None:
    def take_and_hang_up(raw: socket.socket, frames: Frames) -> None:
        frames.receive("a request")

    with scripted(take_and_hang_up) as address, connected(address) as channel:
        text = r"lost server 0 \(127.0.0.1:\d+\) during save: it closed the connection"
        with pytest.raises(PeerLostError, match=text):
            channel.call(Save("f", "t", 1))


def test_a_server_that_is_gone_is_named_once_reconnecting_failed() -> None:
    desk = Desk()
    with listening(desk) as server, connected(server.address, retry=RetryPolicy(0.3)) as channel:
        channel.call(PULL)
        server.stop()
        with pytest.raises(PeerLostError, match=r"lost server 0 .* during pull.*not ready within"):
            channel.call(PULL)


def test_an_end_in_the_middle_of_a_frame_is_a_loss() -> None:
    def half_an_answer(raw: socket.socket, frames: Frames) -> None:
        frame = frames.receive("a request")
        assert frame is not None
        raw.sendall(b"\xf1EET\x01\x00\x00")

    with (
        scripted(half_an_answer) as address,
        connected(address, retry=RetryPolicy(0)) as channel,
        pytest.raises(PeerLostError, match="in the middle of a frame"),
    ):
        channel.call(PULL)


def test_an_answer_to_another_request_is_refused() -> None:
    def confuse(raw: socket.socket, frames: Frames) -> None:
        frames.receive("a request")
        frames.send(77, Done(), (), "a reply")

    with (
        scripted(confuse) as address,
        connected(address) as channel,
        pytest.raises(ProtocolError, match=r"server 0 .* answered request 77, expected 1"),
    ):
        channel.call(PULL)


def test_garbage_for_an_answer_is_a_protocol_error_of_that_server() -> None:
    def chatter(raw: socket.socket, frames: Frames) -> None:
        raw.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with (
        scripted(chatter) as address,
        connected(address) as channel,
        pytest.raises(ProtocolError, match=r"server 0 \(127.*got an HTTP answer"),
    ):
        channel.call(PULL)


def test_the_reason_of_a_refusal_is_heard_even_while_sending() -> None:
    def refuse(raw: socket.socket, frames: Frames) -> None:
        frames.send(0, Failure("MembershipError", "worker 5 is not of this job"), (), "a refusal")

    with (
        scripted(refuse) as address,
        connected(address, retry=RetryPolicy(0)) as channel,
        pytest.raises(MembershipError, match=r"server 0 .*: worker 5 is not of this job"),
    ):
        channel.call(PULL, [np.zeros(256 << 20, np.uint8)])


def test_a_refused_greeting_is_not_tried_again() -> None:
    desk = Desk()
    desk.error = MembershipError("the job has only 2 workers")
    with listening(desk) as server, pytest.raises(MembershipError, match="only 2 workers"):
        SocketChannel.connect(
            server.address, "server 0", deadline_s=LIMIT_S, greeting=lambda: Heartbeat(0)
        )
    assert desk.seen == [Heartbeat(0)]


def test_another_program_at_the_address_of_a_server_is_thought_of() -> None:
    hint = r"; expected a parameter server there, but another program may listen"
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(DeadlineError, match=hint),
    ):
        SocketChannel.connect(
            silent.getsockname()[:2], "server 0", deadline_s=0.3, greeting=lambda: Heartbeat(0)
        )


def test_servers_that_start_late_are_awaited_and_told() -> None:
    told: list[list[str]] = []
    started: list[Listener] = []
    reserved = [Reservation("127.0.0.1"), Reservation("127.0.0.1")]
    channels = [
        SocketChannel(("127.0.0.1", held.port), f"server {n}", deadline_s=LIMIT_S)
        for n, held in enumerate(reserved)
    ]

    def start_the_next(missing: list[str]) -> None:
        told.append(missing)
        started.append(Listener(("127.0.0.1", reserved[len(started)].port), Desk()))

    started.append(Listener(("127.0.0.1", reserved[0].port), Desk()))
    try:
        connect_all(channels, LIMIT_S, start_the_next)
        assert told == [[f"server 1 (127.0.0.1:{reserved[1].port})"]]
        assert all(channel.call(PULL).message == Pulled(1, 1) for channel in channels)
    finally:
        for part in (*channels, *reserved):
            part.close()
        for server in started:
            server.stop()


def test_servers_that_never_start_are_all_named() -> None:
    reserved = [Reservation("127.0.0.1"), Reservation("127.0.0.1")]
    channels = [
        SocketChannel(("127.0.0.1", held.port), f"server {n}", deadline_s=LIMIT_S)
        for n, held in enumerate(reserved)
    ]
    text = r"not ready within 0.2 s: server 0 .*refused; server 1 \(.*refused"
    with pytest.raises(DeadlineError, match=text):
        connect_all(channels, 0.2)
    for held in reserved:
        held.close()


def test_an_address_that_does_not_exist_is_a_server_that_is_not_ready() -> None:
    with pytest.raises(DeadlineError, match=r"server 0 \(no-such-host.invalid:80\): \S"):
        SocketChannel.connect(("no-such-host.invalid", 80), "server 0", deadline_s=0.1)


def test_an_interrupted_wait_leaves_no_half_read_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with listening(Desk()) as server, connected(server.address) as channel:
        monkeypatch.setattr(channel._frames, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            channel.call(PULL, [np.ones(3)])
        assert channel.call(PULL, [np.zeros(1)]).arrays[0].tolist() == [0.0]


def test_a_channel_may_be_closed_while_another_thread_waits_on_it() -> None:
    """That thread is told, and does not connect again."""
    desk = Desk()
    asked, answered = threading.Event(), threading.Event()

    def hold(_: Connection) -> None:
        asked.set()
        assert answered.wait(LIMIT_S)

    desk.on_ask = hold
    with listening(desk) as server, connected(server.address) as channel:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waits = pool.submit(channel.call, FiguresRequest())
            assert asked.wait(LIMIT_S)
            channel.close()
            assert isinstance(waits.exception(LIMIT_S), PeerLostError)
            answered.set()
        with pytest.raises(PeerLostError, match=r"server 0 .*closed before pull"):
            channel.call(PULL)
        with pytest.raises(PeerLostError, match="closed during connecting"):
            connect_all([channel], LIMIT_S)
    assert [type(message) for message in desk.seen] == [FiguresRequest]


def test_nothing_waits_longer_than_forever() -> None:
    with listening(Desk()) as server, connected(server.address, deadline_s=math.inf) as channel:
        assert channel.call(PULL).message == Pulled(1, 1)
