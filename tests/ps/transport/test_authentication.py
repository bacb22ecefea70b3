# SPDX-License-Identifier: Apache-2.0
"""The token of a job over real sockets: who knows it gets in, anybody else is told so."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ps.transport.doubles import (
    LIMIT_S,
    PULL,
    Desk,
    connected,
    listening,
    raw_client,
    read_all,
    scripted,
    told,
)

from fleetlight.errors import MembershipError, ProtocolError
from fleetlight.ps.messages import (
    AuthRequest,
    Challenge,
    Done,
    Failure,
    FiguresRequest,
    Heartbeat,
    Message,
    Proof,
    Pulled,
)
from fleetlight.ps.transport import Listener, SocketChannel
from fleetlight.ps.transport.authentication import _encoder
from fleetlight.ps.transport.frames import Frames
from fleetlight.roles.secret import Secret
from fleetlight.security.context import client_context, server_context
from fleetlight.security.token import CLIENT, SERVER, ProofTranscript, nonce
from fleetlight.wire.plain import Wire

TOKEN, OTHER = Secret("3f9ac27e51d0b846"), Secret("b846d0513f9ac27e")
GREETING = Heartbeat(7)
SAID = _encoder.encode(GREETING)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def server(desk: Desk) -> Iterator[Listener]:
    with listening(desk, token=TOKEN) as listener:
        yield listener


def greeted(address: Any, token: Secret | None, **options: Any) -> SocketChannel:
    return SocketChannel.connect(
        address, "server 0", deadline_s=LIMIT_S, token=token, greeting=lambda: GREETING, **options
    )


def test_who_knows_the_token_is_welcomed_and_works(server: Listener, desk: Desk) -> None:
    channel = greeted(server.address, TOKEN)
    assert channel.welcome is not None
    assert channel.welcome.message == Done()
    assert channel.call(PULL, [np.arange(3)]).arrays[0].tolist() == [0, 1, 2]
    channel.close()
    assert desk.seen == [GREETING, PULL]


def test_a_connection_that_replaces_another_is_proved_again(server: Listener, desk: Desk) -> None:
    channel = greeted(server.address, TOKEN)
    assert channel._frames is not None
    channel._frames.wire._socket.shutdown(socket.SHUT_RDWR)
    assert channel.call(PULL).message == Pulled(1, 1)
    channel.close()
    assert desk.seen == [GREETING, GREETING, PULL]


def refused(address: Any, token: Secret | None) -> str:
    with pytest.raises(MembershipError) as caught:
        greeted(address, token)
    return str(caught.value)


@pytest.mark.parametrize(
    ("theirs", "ours", "why"),
    [
        (OTHER, TOKEN, "does not know the token of this job; give all processes"),
        (None, TOKEN, "has no token"),
        (TOKEN, None, "this server has no token"),
    ],
    ids=["wrong", "the worker has none", "the server has none"],
)
def test_both_sides_say_what_is_wrong_and_what_to_do(
    theirs: Secret | None,
    ours: Secret | None,
    why: str,
    desk: Desk,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "fleetlight"), listening(desk, token=ours) as listener:
        text = refused(listener.address, theirs)
        listener.stop()
    (line,) = (record.getMessage() for record in caplog.records)
    for said in (text, line):
        assert why in said
        assert "(FLEET_TOKEN, or fleetrun --token_file)" in said
        assert TOKEN.reveal() not in said
        assert OTHER.reveal() not in said
    assert desk.seen == []


def frames_to(raw: socket.socket) -> Frames:
    return Frames(Wire(raw, "the server"), LIMIT_S)


def answer(frames: Frames) -> Message:
    frame = frames.receive("a test")
    assert frame is not None
    return frame.message


@pytest.mark.parametrize(
    "message", [FiguresRequest(), PULL, Proof(bytes(32)), Challenge(bytes(32))]
)
def test_nothing_is_answered_before_the_proof(
    message: Message, server: Listener, desk: Desk
) -> None:
    with raw_client(server.address) as raw:
        frames_to(raw).send(1, message, (), "a test")
        failure = told(raw)
        assert isinstance(failure, Failure)
        assert "has no token" in failure.text
        assert read_all(raw) == b""
    with raw_client(server.address) as raw:
        frames = frames_to(raw)
        frames.send(1, AuthRequest(nonce(), SAID), (), "a test")
        assert isinstance(answer(frames), Challenge)
        frames.send(1, message, (), "a test")
        assert isinstance(answer(frames), Failure)
        assert read_all(raw) == b""
    assert desk.seen == []


def test_a_proof_that_was_listened_to_does_not_work_again(server: Listener, desk: Desk) -> None:
    """The numbers differ: the server's own is new for every connection."""
    sent = []
    with raw_client(server.address) as raw:
        frames = frames_to(raw)
        knock = AuthRequest(nonce(), SAID)
        frames.send(1, knock, (), "a test")
        challenge = answer(frames)
        assert isinstance(challenge, Challenge)
        met = ProofTranscript(knock.nonce, challenge.nonce, SAID)
        sent = [knock, Proof(met.proof(TOKEN, CLIENT))]
        frames.send(1, sent[1], (), "a test")
        assert answer(frames) == Proof(met.proof(TOKEN, SERVER))
        assert answer(frames) == Done()
    with raw_client(server.address) as raw:
        frames = frames_to(raw)
        frames.send(1, sent[0], (), "a test")
        assert isinstance(answer(frames), Challenge)
        frames.send(1, sent[1], (), "a test")
        failure = answer(frames)
    assert isinstance(failure, Failure)
    assert "does not know the token" in failure.text
    assert desk.seen == [GREETING]


def test_a_proof_for_another_greeting_does_not_work(server: Listener, desk: Desk) -> None:
    """Who stands between two sides cannot put himself in the place of another worker."""
    with raw_client(server.address) as raw:
        frames = frames_to(raw)
        knock = AuthRequest(nonce(), _encoder.encode(Heartbeat(8)))
        frames.send(1, knock, (), "a test")
        challenge = answer(frames)
        assert isinstance(challenge, Challenge)
        proof = ProofTranscript(knock.nonce, challenge.nonce, SAID).proof(TOKEN, CLIENT)
        frames.send(1, Proof(proof), (), "a test")
        assert isinstance(answer(frames), Failure)
    assert desk.seen == []


def test_a_greeting_that_makes_no_sense_ends_its_connection(
    server: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_client(server.address) as raw:
        frames = frames_to(raw)
        knock = AuthRequest(nonce(), b"\xc1")
        frames.send(1, knock, (), "a test")
        challenge = answer(frames)
        assert isinstance(challenge, Challenge)
        proof = ProofTranscript(knock.nonce, challenge.nonce, knock.greeting).proof(TOKEN, CLIENT)
        frames.send(1, Proof(proof), (), "a test")
        answer(frames)
        read_all(raw)
    with connected(server.address, token=TOKEN, greeting=lambda: GREETING) as channel:
        assert channel.call(PULL).message == Pulled(1, 1)
    assert "the greeting makes no sense" in caplog.text


def welcomes_anybody(raw: socket.socket, frames: Frames) -> None:
    frame = frames.receive("a test")
    assert frame is not None
    frames.send(frame.request, Done(), (), "a test")


def asks_and_does_not_prove(raw: socket.socket, frames: Frames) -> None:
    for message in (Challenge(nonce()), Done()):
        frame = frames.receive("a test")
        assert frame is not None
        frames.send(frame.request, message, (), "a test")


def sends_the_proof_back(raw: socket.socket, frames: Frames) -> None:
    frame = frames.receive("a test")
    assert frame is not None
    assert isinstance(frame.message, AuthRequest)
    frames.send(frame.request, Challenge(frame.message.nonce), (), "a test")
    frame = frames.receive("a test")
    assert frame is not None
    frames.send(frame.request, frame.message, (), "a test")


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (welcomes_anybody, "does not check the token"),
        (asks_and_does_not_prove, "does not know the token"),
        (sends_the_proof_back, "does not know the token"),
    ],
)
def test_a_worker_gives_nothing_to_a_stranger_that_poses_as_its_server(act: Any, why: str) -> None:
    with scripted(act) as address:
        assert why in refused(address, TOKEN)


def test_who_knocks_and_says_no_more_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with (
        listening(Desk(), token=TOKEN, first_s=0.3) as listener,
        raw_client(listener.address) as raw,
    ):
        frames = frames_to(raw)
        frames.send(1, AuthRequest(nonce(), SAID), (), "a test")
        answer(frames)
        assert read_all(raw) == b""
    assert "was silent for 0." in caplog.text


def test_who_has_not_proved_counts_as_a_stranger(desk: Desk) -> None:
    with (
        listening(desk, token=TOKEN, strangers=1, stranger_s=0.0) as listener,
        raw_client(listener.address) as raw,
    ):
        frames = frames_to(raw)
        frames.send(1, AuthRequest(nonce(), SAID), (), "a test")
        assert isinstance(answer(frames), Challenge)
        channel = greeted(listener.address, TOKEN)
        assert read_all(raw) == b""
        assert channel.call(PULL).message == Pulled(1, 1)
        channel.close()


def test_inside_tls_the_token_counts_as_well(certificates: Path, desk: Desk) -> None:
    tls = client_context(certificates)
    with listening(desk, server_context(certificates), token=TOKEN) as listener:
        channel = greeted(listener.address, TOKEN, tls=tls)
        assert channel.call(PULL).message == Pulled(1, 1)
        channel.close()
        for token, why in ((OTHER, "does not know the token"), (None, "has no token")):
            with pytest.raises(MembershipError, match=why):
                greeted(listener.address, token, tls=tls)


def test_the_token_is_on_no_wire(desk: Desk) -> None:
    """All that travels, in both directions, through a relay."""
    door, passed = socket.create_server(("127.0.0.1", 0)), bytearray()

    def relay(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            passed.extend(data)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

    with listening(desk, token=TOKEN) as listener, door:
        channel: list[SocketChannel] = []
        caller = threading.Thread(target=lambda: channel.append(greeted(door.getsockname(), TOKEN)))
        caller.start()
        near, _ = door.accept()
        with near, raw_client(listener.address) as far:
            back = threading.Thread(target=relay, args=(far, near))
            forth = threading.Thread(target=relay, args=(near, far))
            back.start(), forth.start()
            caller.join(LIMIT_S)
            channel[0].call(PULL, [np.arange(5)])
            channel[0].close()
            forth.join(LIMIT_S), back.join(LIMIT_S)
    assert len(passed) > 200
    assert TOKEN.reveal().encode() not in passed


def test_a_server_that_speaks_something_else_is_named() -> None:
    def chatter(raw: socket.socket, frames: Frames) -> None:
        raw.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(30))
        read_all(raw)

    with scripted(chatter) as address, pytest.raises(ProtocolError, match="an HTTP answer"):
        greeted(address, TOKEN)
