# SPDX-License-Identifier: Apache-2.0
"""Who may connect: tokens and TLS."""

import itertools
import logging
import re
import socket
import ssl
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.launch.workplace import wait_until
from tests.ps.transport import expired
from tests.ps.transport.doubles import (
    LIMIT_S,
    PULL,
    RecordingHandler,
    connected,
    listening,
    raw_client,
    read_all,
    receive_message,
    received,
    scripted,
)

from fleetlight.errors import DeadlineError, MembershipError, PeerLostError, ProtocolError
from fleetlight.ps import messages as m
from fleetlight.ps.transport import Listener, SocketChannel, connect_all, session
from fleetlight.ps.transport.authentication import _encoder
from fleetlight.ps.transport.frames import Frames
from fleetlight.ps.transport.interface import RetryPolicy
from fleetlight.ps.transport.memory.memory_budget import UNLIMITED
from fleetlight.ps.transport.session import ConnectionLimits, Session
from fleetlight.roles.secret import Secret
from fleetlight.security.context import client_context, server_context
from fleetlight.security.token import CLIENT, SERVER, ProofTranscript, nonce
from fleetlight.wire.plain import Wire
from fleetlight.wire.tls import _BATCH_BYTES, _RECORD_BYTES, TlsWire

# Authentication by the token of a job, over real sockets.


TOKEN, OTHER = Secret("3f9ac27e51d0b846"), Secret("b846d0513f9ac27e")
GREETING = m.Heartbeat(7)
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
    assert channel.welcome.message == m.Done()
    assert channel.call(PULL, [np.arange(3)]).arrays[0].tolist() == [0, 1, 2]
    channel.close()
    assert handler.seen == [GREETING, PULL]


def test_a_reconnection_is_authenticated_again(server: Listener, handler: RecordingHandler) -> None:
    channel = greet(server.address, TOKEN)
    assert channel._frames is not None
    channel._frames.wire._socket.shutdown(socket.SHUT_RDWR)
    assert channel.call(PULL).message == m.Pulled(1, 1)
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


def receive(frames: Frames) -> m.Message:
    return received(frames).message


@pytest.mark.parametrize(
    "message", [m.MetricsRequest(), PULL, m.Proof(bytes(32)), m.Challenge(bytes(32))]
)
def test_no_request_is_served_before_the_proof(
    message: m.Message, server: Listener, handler: RecordingHandler
) -> None:
    with raw_client(server.address) as raw:
        frames_to(raw).send(1, message, (), "a test")
        failure = receive_message(raw)
        assert isinstance(failure, m.Failure)
        assert "has no token" in failure.text
        assert read_all(raw) == b""
    with raw_client(server.address) as raw:
        frames = frames_to(raw)
        frames.send(1, m.AuthRequest(nonce(), GREETING_BYTES), (), "a test")
        assert isinstance(receive(frames), m.Challenge)
        frames.send(1, message, (), "a test")
        assert isinstance(receive(frames), m.Failure)
        assert read_all(raw) == b""
    assert handler.seen == []


def test_a_replayed_proof_is_refused(server: Listener, handler: RecordingHandler) -> None:
    """The server's challenge is new for every connection."""
    sent = []
    with raw_client(server.address) as raw:
        frames = frames_to(raw)
        auth_request = m.AuthRequest(nonce(), GREETING_BYTES)
        frames.send(1, auth_request, (), "a test")
        challenge = receive(frames)
        assert isinstance(challenge, m.Challenge)
        transcript = ProofTranscript(auth_request.nonce, challenge.nonce, GREETING_BYTES)
        sent = [auth_request, m.Proof(transcript.proof(TOKEN, CLIENT))]
        frames.send(1, sent[1], (), "a test")
        assert receive(frames) == m.Proof(transcript.proof(TOKEN, SERVER))
        assert receive(frames) == m.Done()
    with raw_client(server.address) as raw:
        frames = frames_to(raw)
        frames.send(1, sent[0], (), "a test")
        assert isinstance(receive(frames), m.Challenge)
        frames.send(1, sent[1], (), "a test")
        failure = receive(frames)
    assert isinstance(failure, m.Failure)
    assert "does not know the token" in failure.text
    assert handler.seen == [GREETING]


def test_a_proof_for_another_greeting_is_refused(
    server: Listener, handler: RecordingHandler
) -> None:
    """A man in the middle cannot pose as another worker."""
    with raw_client(server.address) as raw:
        frames = frames_to(raw)
        auth_request = m.AuthRequest(nonce(), _encoder.encode(m.Heartbeat(8)))
        frames.send(1, auth_request, (), "a test")
        challenge = receive(frames)
        assert isinstance(challenge, m.Challenge)
        proof = ProofTranscript(auth_request.nonce, challenge.nonce, GREETING_BYTES).proof(
            TOKEN, CLIENT
        )
        frames.send(1, m.Proof(proof), (), "a test")
        assert isinstance(receive(frames), m.Failure)
    assert handler.seen == []


def test_a_malformed_greeting_closes_its_connection(
    server: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    with raw_client(server.address) as raw:
        frames = frames_to(raw)
        auth_request = m.AuthRequest(nonce(), b"\xc1")
        frames.send(1, auth_request, (), "a test")
        challenge = receive(frames)
        assert isinstance(challenge, m.Challenge)
        proof = ProofTranscript(auth_request.nonce, challenge.nonce, auth_request.greeting).proof(
            TOKEN, CLIENT
        )
        frames.send(1, m.Proof(proof), (), "a test")
        receive(frames)
        read_all(raw)
    with connected(server.address, token=TOKEN, greeting=lambda: GREETING) as channel:
        assert channel.call(PULL).message == m.Pulled(1, 1)
    # its thread logs after it has closed the connection
    wait_until(lambda: "the greeting makes no sense" in caplog.text, "the line of the log")


def welcome_without_challenge(raw: socket.socket, frames: Frames) -> None:
    frame = received(frames)
    frames.send(frame.request, m.Done(), (), "a test")


def challenge_without_proof(raw: socket.socket, frames: Frames) -> None:
    for message in (m.Challenge(nonce()), m.Done()):
        frame = received(frames)
        frames.send(frame.request, message, (), "a test")


def reflect_the_proof(raw: socket.socket, frames: Frames) -> None:
    frame = received(frames)
    assert isinstance(frame.message, m.AuthRequest)
    frames.send(frame.request, m.Challenge(frame.message.nonce), (), "a test")
    frame = received(frames)
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
        frames.send(1, m.AuthRequest(nonce(), GREETING_BYTES), (), "a test")
        receive(frames)
        assert read_all(raw) == b""
    assert re.search(r"was silent for \d+\.\d s", caplog.text)


def test_a_client_without_a_proof_counts_as_unauthenticated(handler: RecordingHandler) -> None:
    with (
        listening(handler, token=TOKEN, unauthenticated=1, unauthenticated_s=0.0) as listener,
        raw_client(listener.address) as raw,
    ):
        frames = frames_to(raw)
        frames.send(1, m.AuthRequest(nonce(), GREETING_BYTES), (), "a test")
        assert isinstance(receive(frames), m.Challenge)
        channel = greet(listener.address, TOKEN)
        assert read_all(raw) == b""
        assert channel.call(PULL).message == m.Pulled(1, 1)
        channel.close()


def test_the_token_is_checked_inside_tls(certificates: Path, handler: RecordingHandler) -> None:
    tls = client_context(certificates)
    with listening(handler, server_context(certificates), token=TOKEN) as listener:
        channel = greet(listener.address, TOKEN, tls=tls)
        assert channel.call(PULL).message == m.Pulled(1, 1)
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


# TLS: only peers of the job connect; both sides learn why others are refused.


SIZES = [300_000, 0, 1, 16383, 16384, 16385, 5 << 20]


@pytest.fixture
def tls_server(certificates: Path) -> Iterator[Listener]:
    with listening(RecordingHandler(), server_context(certificates), first_s=5.0) as listener:
        yield listener


def tls_refusal(listener: Listener, tls: ssl.SSLContext | None) -> str:
    """The error of a client that the server refuses."""
    with pytest.raises(MembershipError) as caught:
        SocketChannel.connect(
            listener.address, "server 0", deadline_s=5.0, tls=tls, greeting=lambda: m.Heartbeat(0)
        )
    return str(caught.value)


def bare_client(
    trusted: Path, certificate: Path | None = None, side: str = "client"
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(trusted / "ca.pem")
    if certificate is not None:
        context.load_cert_chain(certificate / f"{side}.pem", certificate / f"{side}.key")
    return context


@pytest.mark.sampled(7)
@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_arrays_of_any_size_round_trip(tls_server: Listener, certificates: Path, size: int) -> None:
    with connected(tls_server.address, tls=client_context(certificates)) as channel:
        channel.call(m.Leave())
        sent = [np.arange(size) % 251, np.arange(size // 3).astype(np.uint8)]
        for _ in range(2):
            reply = channel.call(PULL, sent)
            assert reply.message == m.Pulled(1, 1)
            for sent_array, got in zip(sent, reply.arrays, strict=True):
                np.testing.assert_array_equal(sent_array, got)


def test_large_arrays_neither_stall_nor_fill_memory(
    tls_server: Listener, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may wait only for bytes that are sure to arrive, or it would stall."""
    waits_for_sure_bytes, batches = [], []
    fetch, encrypt = TlsWire._fetch, TlsWire._encrypt

    def watched_fetch(wire: TlsWire, wanted: int) -> int:
        count = fetch(wire, wanted)
        sure = min(_BATCH_BYTES, wanted - _RECORD_BYTES)
        waits_for_sure_bytes.append(sure <= 0 or count == sure)
        return count

    def watched_encrypt(wire: TlsWire, buffers: Sequence[memoryview]) -> int:
        batches.append(encrypt(wire, buffers))
        return batches[-1]

    monkeypatch.setattr(TlsWire, "_fetch", watched_fetch)
    monkeypatch.setattr(TlsWire, "_encrypt", watched_encrypt)
    with connected(tls_server.address, tls=client_context(certificates)) as channel:
        channel.call(m.Leave())
        channel.call(PULL, [np.zeros(1 << 20, np.uint8), np.zeros(333_333, np.uint8)])
    assert all(waits_for_sure_bytes)
    assert len(batches) > 10
    assert max(batches) < _BATCH_BYTES + _RECORD_BYTES


def test_bytes_on_the_wire_are_encrypted(certificates: Path) -> None:
    seen = b""

    def record(raw: Any, frames: object) -> None:
        nonlocal seen
        seen = raw.recv(1 << 16)

    with scripted(record) as address:
        channel = SocketChannel(
            lambda: address, "s", deadline_s=LIMIT_S, tls=client_context(certificates)
        )
        with pytest.raises(PeerLostError):
            channel.open(LIMIT_S)
    assert seen.startswith(b"\x16\x03")


def test_a_connection_ends_like_a_plain_one(certificates: Path) -> None:
    handler = RecordingHandler()
    handler.on_ask = lambda connection: connection.close()
    tls = client_context(certificates)
    with listening(handler, server_context(certificates)) as server:
        text = r"lost server 0 .* during metrics"
        with (
            connected(server.address, tls=tls, retry=RetryPolicy(0)) as channel,
            pytest.raises(PeerLostError, match=text),
        ):
            channel.call(m.MetricsRequest())
        with connected(server.address, tls=tls) as channel:
            assert channel.call(m.Heartbeat(0)).message == m.Done()
    assert isinstance(handler.ends[0], PeerLostError)
    assert handler.ends[1] is None


def test_a_deadline_works_like_that_of_a_plain_connection(certificates: Path) -> None:
    release = threading.Event()
    handler = RecordingHandler()
    handler.on_ask = lambda connection: release.wait(LIMIT_S) and None
    with (
        listening(handler, server_context(certificates)) as server,
        connected(server.address, tls=client_context(certificates)) as channel,
    ):
        with pytest.raises(DeadlineError, match=r"was silent for \d+\.\d s during metrics"):
            channel.call(m.MetricsRequest(), deadline_s=0.1)
        release.set()
        # over a new connection: the late reply is not taken for this one's
        assert channel.call(PULL, [np.ones(2)]).arrays[0].tolist() == [1.0, 1.0]


SILENT = r"not ready .* silent .* during the TLS handshake; does it listen without TLS\?"


def test_a_server_silent_in_the_handshake_is_named(certificates: Path) -> None:
    def stay_silent(raw: Any, frames: object) -> None:
        read_all(raw)

    with scripted(stay_silent) as address:
        channel = SocketChannel(
            lambda: address, "server 0", deadline_s=1.0, tls=client_context(certificates)
        )
        with pytest.raises(DeadlineError, match=SILENT):
            connect_all([channel], 0.2)


def with_no_certificate(ours: Path, theirs: Path) -> ssl.SSLContext:
    return bare_client(ours)


def with_another_ca(ours: Path, theirs: Path) -> ssl.SSLContext:
    return bare_client(ours, theirs)


def with_the_servers_certificate(ours: Path, theirs: Path) -> ssl.SSLContext:
    return bare_client(ours, ours, side="server")


def with_trust_in_another_ca(ours: Path, theirs: Path) -> ssl.SSLContext:
    return client_context(theirs)


def with_old_tls(ours: Path, theirs: Path) -> ssl.SSLContext:
    context = bare_client(ours, ours)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return context


def without_tls(ours: Path, theirs: Path) -> None:
    return None


REFUSED: dict[Callable[[Path, Path], ssl.SSLContext | None], tuple[str, str]] = {
    with_no_certificate: ("it requires a certificate and got none", "shows no certificate"),
    with_another_ca: ("refuses this side's certificate: another CA", "another CA signed"),
    with_the_servers_certificate: ("it is made for the other role", "made for another purpose"),
    with_trust_in_another_ca: (
        "another CA signed the certificate",
        "refuses this side's certificate",
    ),
    with_old_tls: ("does not support TLS 1.3", "does not support TLS 1.3"),
    without_tls: ("connected without TLS", "connected without TLS"),
}


@pytest.mark.parametrize("client", REFUSED, ids=lambda client: client.__name__)
def test_wrong_credentials_are_refused_with_the_reason_on_both_sides(
    client: Callable[[Path, Path], ssl.SSLContext | None],
    tls_server: Listener,
    certificates: Path,
    other_certificates: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for_client, for_server = REFUSED[client]
    with caplog.at_level(logging.WARNING, "fleetlight"):
        text = tls_refusal(tls_server, client(certificates, other_certificates))
        tls_server.stop()
    assert text.startswith(("server 0 (127.0.0.1", "no connection with server 0 (127.0.0.1"))
    assert for_client in text
    (line,) = (record.getMessage() for record in caplog.records)
    assert for_server in line
    assert tls_server._handler.seen == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("side", "for_client", "for_server"),
    [
        ("client", "refuses this side's certificate: it has expired", "is not valid now"),
        ("server", "is not valid now (certificate has expired)", "it has expired"),
    ],
)
def test_an_expired_certificate_is_refused_by_the_other_side(
    side: str, for_client: str, for_server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = expired.made(tmp_path / "certificates", side)
    tls = expired.context(folder, "server")
    with (
        caplog.at_level(logging.WARNING, "fleetlight"),
        listening(RecordingHandler(), tls, first_s=5.0) as listener,
    ):
        text = tls_refusal(listener, expired.context(folder, "client"))
    assert for_client in text
    (line,) = (record.getMessage() for record in caplog.records)
    assert for_server in line


def test_a_tls_client_of_a_plain_server_is_refused(
    certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fleetlight"), listening(RecordingHandler()) as plain:
        text = tls_refusal(plain, client_context(certificates))
    assert "the other side does not use TLS; give --ssl DIR" in text
    (line,) = (record.getMessage() for record in caplog.records)
    assert "a TLS hello; one side uses ssl and the other does not" in line


def test_a_server_at_an_uncertified_address_is_refused(certificates: Path) -> None:
    server = Listener(("127.0.0.2", 0), RecordingHandler(), tls=server_context(certificates))
    try:
        text = tls_refusal(server, client_context(certificates))
    finally:
        server.stop()
    assert "names other hosts (IP address mismatch" in text
    assert "fleetlight cert DIR --host NAME" in text


def test_a_plain_request_to_a_tls_port_is_logged(
    tls_server: Listener, certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fleetlight"):
        with raw_client(tls_server.address) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
            read_all(raw)
        with connected(tls_server.address, tls=client_context(certificates)) as channel:
            assert channel.call(PULL).message == m.Pulled(1, 1)
        # a session logs its end after it has closed the connection
        tls_server.stop()
    (line,) = (record.getMessage() for record in caplog.records)
    assert "does not use TLS" in line


def test_a_silent_client_of_a_tls_port_is_dropped(
    certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "fleetlight"),
        listening(RecordingHandler(), server_context(certificates), first_s=0.2) as server,
    ):
        for start in (b"", b"\x16\x03\x01\x02\x00"):
            with raw_client(server.address) as raw:
                raw.sendall(start)
                read_all(raw)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("closed a connection: ")
    assert re.search(r"silent for \d+\.\d s", second)


class LoggingSocket(socket.socket):
    """A socket that records its timeouts."""

    limits: list[float | None]

    def settimeout(self, limit_s: float | None) -> None:
        self.limits.append(limit_s)
        super().settimeout(limit_s)


def test_first_byte_and_handshake_share_one_time_limit(
    certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time spent on the first byte is not available for the handshake."""
    handshakes: list[float] = []

    def refuse(wire: TlsWire, tls: ssl.SSLContext, limit_s: float) -> None:
        handshakes.append(limit_s)
        raise MembershipError("not you")

    monkeypatch.setattr(TlsWire, "handshake", refuse)
    clock = itertools.count(100.0, 5.0)
    monkeypatch.setattr(session, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    with (
        socket.create_server(("127.0.0.1", 0)) as listening_socket,
        raw_client(listening_socket.getsockname()) as raw,
    ):
        raw.sendall(b"\x16")
        raw.shutdown(socket.SHUT_WR)
        accepted = LoggingSocket(fileno=listening_socket.accept()[0].detach())
        accepted.limits = []
        tls, limits, ended = (
            server_context(certificates),
            ConnectionLimits(first_s=20.0),
            threading.Event(),
        )
        Session(
            accepted,
            "a stranger",
            RecordingHandler(),
            tls=tls,
            token=None,
            limits=limits,
            budget=UNLIMITED,
            ended=lambda _: ended.set(),
        ).run()
    # each reading of the clock takes five seconds
    assert (accepted.limits[0], handshakes) == (15.0, [10.0])
    assert ended.is_set()
