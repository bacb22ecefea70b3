# SPDX-License-Identifier: Apache-2.0
"""Authentication by the token of a job, over real sockets."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.launch.workplace import wait_until
from tests.ps.transport.doubles import (
    LIMIT_S,
    PULL,
    RecordingHandler,
    connected,
    listening,
    raw_client,
    read_all,
    receive_message,
    scripted,
)

from fleetlight.errors import MembershipError, ProtocolError
from fleetlight.ps.messages import (
    AuthRequest,
    Challenge,
    Done,
    Failure,
    Heartbeat,
    Message,
    MetricsRequest,
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
GREETING_BYTES = _encoder.encode(GREETING)


@pytest.fixture
def handler() -> RecordingHandler:
    return RecordingHandler()


@pytest.fixture
def server(handler: RecordingHandler) -> Iterator[Listener]:
    with listening(handler, token=TOKEN) as listener:
        yield listener


def greet(address: Any, token: Secret | None, **options: Any) -> SocketChannel:
    return SocketChannel.connect(
        address, "server 0", deadline_s=LIMIT_S, token=token, greeting=lambda: GREETING, **options
    )


def test_a_client_with_the_token_is_welcomed(server: Listener, handler: RecordingHandler) -> None:
    channel = greet(server.address, TOKEN)
    assert channel.welcome is not None
    assert channel.welcome.message == Done()
    assert channel.call(PULL, [np.arange(3)]).arrays[0].tolist() == [0, 1, 2]
    channel.close()
    assert handler.seen == [GREETING, PULL]


def test_a_reconnection_is_authenticated_again(server: Listener, handler: RecordingHandler) -> None:
    channel = greet(server.address, TOKEN)
    assert channel._frames is not None
    channel._frames.wire._socket.shutdown(socket.SHUT_RDWR)
    assert channel.call(PULL).message == Pulled(1, 1)
    channel.close()
    assert handler.seen == [GREETING, GREETING, PULL]


def refusal(address: Any, token: Secret | None) -> str:
    with pytest.raises(MembershipError) as caught:
        greet(address, token)
    return str(caught.value)


@pytest.mark.parametrize(
    ("client_token", "server_token", "reason"),
    [
        (OTHER, TOKEN, "does not know the token of this job; give all processes"),
        (None, TOKEN, "has no token"),
        (TOKEN, None, "this server has no token"),
    ],
    ids=["wrong", "the worker has none", "the server has none"],
)
def test_both_sides_report_the_reason_and_the_remedy(
    client_token: Secret | None,
    server_token: Secret | None,
    reason: str,
    handler: RecordingHandler,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.INFO, "fleetlight"),
        listening(handler, token=server_token) as listener,
    ):
        text = refusal(listener.address, client_token)
        listener.stop()
    (line,) = (record.getMessage() for record in caplog.records)
    for text_ in (text, line):
        assert reason in text_
        assert "(FLEET_TOKEN, or fleetrun --token_file)" in text_
        assert TOKEN.reveal() not in text_
        assert OTHER.reveal() not in text_
    assert handler.seen == []


def frames_to(raw: socket.socket) -> Frames:
    return Frames(Wire(raw, "the server"), LIMIT_S)


def receive(frames: Frames) -> Message:
    frame = frames.receive("a test")
    assert frame is not None
    return frame.message


@pytest.mark.parametrize(
    "message", [MetricsRequest(), PULL, Proof(bytes(32)), Challenge(bytes(32))]
)
def test_no_request_is_served_before_the_proof(
    message: Message, server: Listener, handler: RecordingHandler
) -> None:
    with raw_client(server.address) as raw:
        frames_to(raw).send(1, message, (), "a test")
        failure = receive_message(raw)
        assert isinstance(failure, Failure)
        assert "has no token" in failure.text
        assert read_all(raw) == b""
    with raw_client(server.address) as raw:
        frames = frames_to(raw)
        frames.send(1, AuthRequest(nonce(), GREETING_BYTES), (), "a test")
        assert isinstance(receive(frames), Challenge)
        frames.send(1, message, (), "a test")
        assert isinstance(receive(frames), Failure)
        assert read_all(raw) == b""
    assert handler.seen == []


def test_a_replayed_proof_is_refused(server: Listener, handler: RecordingHandler) -> None:
    """The server's challenge is new for every connection."""
    sent = []
    with raw_client(server.address) as raw:
        frames = frames_to(raw)
        auth_request = AuthRequest(nonce(), GREETING_BYTES)
        frames.send(1, auth_request, (), "a test")
        challenge = receive(frames)
        assert isinstance(challenge, Challenge)
        transcript = ProofTranscript(auth_request.nonce, challenge.nonce, GREETING_BYTES)
        sent = [auth_request, Proof(transcript.proof(TOKEN, CLIENT))]
        frames.send(1, sent[1], (), "a test")
        assert receive(frames) == Proof(transcript.proof(TOKEN, SERVER))
        assert receive(frames) == Done()
    with raw_client(server.address) as raw:
        frames = frames_to(raw)
        frames.send(1, sent[0], (), "a test")
        assert isinstance(receive(frames), Challenge)
        frames.send(1, sent[1], (), "a test")
        failure = receive(frames)
    assert isinstance(failure, Failure)
    assert "does not know the token" in failure.text
    assert handler.seen == [GREETING]


def test_a_proof_for_another_greeting_is_refused(
    server: Listener, handler: RecordingHandler
) -> None:
    """A man in the middle cannot pose as another worker."""
    with raw_client(server.address) as raw:
        frames = frames_to(raw)
        auth_request = AuthRequest(nonce(), _encoder.encode(Heartbeat(8)))
        frames.send(1, auth_request, (), "a test")
        challenge = receive(frames)
        assert isinstance(challenge, Challenge)
        proof = ProofTranscript(auth_request.nonce, challenge.nonce, GREETING_BYTES).proof(
            TOKEN, CLIENT
        )
        frames.send(1, Proof(proof), (), "a test")
        assert isinstance(receive(frames), Failure)
    assert handler.seen == []


def test_a_malformed_greeting_closes_its_connection(
    server: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_client(server.address) as raw:
        frames = frames_to(raw)
        auth_request = AuthRequest(nonce(), b"\xc1")
        frames.send(1, auth_request, (), "a test")
        challenge = receive(frames)
        assert isinstance(challenge, Challenge)
        proof = ProofTranscript(auth_request.nonce, challenge.nonce, auth_request.greeting).proof(
            TOKEN, CLIENT
        )
        frames.send(1, Proof(proof), (), "a test")
        receive(frames)
        read_all(raw)
    with connected(server.address, token=TOKEN, greeting=lambda: GREETING) as channel:
        assert channel.call(PULL).message == Pulled(1, 1)
    # its thread logs after it has closed the connection
    wait_until(lambda: "the greeting makes no sense" in caplog.text, "the line of the log")


def welcome_without_challenge(raw: socket.socket, frames: Frames) -> None:
    frame = frames.receive("a test")
    assert frame is not None
    frames.send(frame.request, Done(), (), "a test")


def challenge_without_proof(raw: socket.socket, frames: Frames) -> None:
    for message in (Challenge(nonce()), Done()):
        frame = frames.receive("a test")
        assert frame is not None
        frames.send(frame.request, message, (), "a test")


def reflect_the_proof(raw: socket.socket, frames: Frames) -> None:
    frame = frames.receive("a test")
    assert frame is not None
    assert isinstance(frame.message, AuthRequest)
    frames.send(frame.request, Challenge(frame.message.nonce), (), "a test")
    frame = frames.receive("a test")
    assert frame is not None
    frames.send(frame.request, frame.message, (), "a test")


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (welcome_without_challenge, "does not check the token"),
        (challenge_without_proof, "does not know the token"),
        (reflect_the_proof, "does not know the token"),
    ],
)
def test_a_worker_refuses_a_server_without_the_token(act: Any, reason: str) -> None:
    with scripted(act) as address:
        assert reason in refusal(address, TOKEN)


def test_a_client_silent_after_the_challenge_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with (
        listening(RecordingHandler(), token=TOKEN, first_s=2.0) as listener,
        raw_client(listener.address) as raw,
    ):
        frames = frames_to(raw)
        frames.send(1, AuthRequest(nonce(), GREETING_BYTES), (), "a test")
        receive(frames)
        assert read_all(raw) == b""
    assert re.search(r"was silent for \d+\.\d s", caplog.text)


def test_a_client_without_a_proof_counts_as_unauthenticated(handler: RecordingHandler) -> None:
    with (
        listening(handler, token=TOKEN, unauthenticated=1, unauthenticated_s=0.0) as listener,
        raw_client(listener.address) as raw,
    ):
        frames = frames_to(raw)
        frames.send(1, AuthRequest(nonce(), GREETING_BYTES), (), "a test")
        assert isinstance(receive(frames), Challenge)
        channel = greet(listener.address, TOKEN)
        assert read_all(raw) == b""
        assert channel.call(PULL).message == Pulled(1, 1)
        channel.close()


def test_the_token_is_checked_inside_tls(certificates: Path, handler: RecordingHandler) -> None:
    tls = client_context(certificates)
    with listening(handler, server_context(certificates), token=TOKEN) as listener:
        channel = greet(listener.address, TOKEN, tls=tls)
        assert channel.call(PULL).message == Pulled(1, 1)
        channel.close()
        for token, reason in ((OTHER, "does not know the token"), (None, "has no token")):
            with pytest.raises(MembershipError, match=reason):
                greet(listener.address, token, tls=tls)


def test_the_token_never_crosses_the_wire(handler: RecordingHandler) -> None:
    """Checks all bytes in both directions through a relay."""
    listening_socket, relayed = socket.create_server(("127.0.0.1", 0)), bytearray()

    def relay(source: socket.socket, sink: socket.socket) -> None:
        while data := source.recv(1 << 16):
            relayed.extend(data)
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)

    with listening(handler, token=TOKEN) as listener, listening_socket:
        channel: list[SocketChannel] = []
        caller = threading.Thread(
            target=lambda: channel.append(greet(listening_socket.getsockname(), TOKEN))
        )
        caller.start()
        client, _ = listening_socket.accept()
        with client, raw_client(listener.address) as upstream:
            from_server = threading.Thread(target=relay, args=(upstream, client))
            to_server = threading.Thread(target=relay, args=(client, upstream))
            from_server.start(), to_server.start()
            caller.join(LIMIT_S)
            channel[0].call(PULL, [np.arange(5)])
            channel[0].close()
            to_server.join(LIMIT_S), from_server.join(LIMIT_S)
    assert len(relayed) > 200
    assert TOKEN.reveal().encode() not in relayed


def test_a_server_of_another_protocol_is_named() -> None:
    def send_http(raw: socket.socket, frames: Frames) -> None:
        raw.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(30))
        read_all(raw)

    with scripted(send_http) as address, pytest.raises(ProtocolError, match="an HTTP answer"):
        greet(address, TOKEN)
