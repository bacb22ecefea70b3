# SPDX-License-Identifier: Apache-2.0
"""TLS: only peers of the job connect; both sides learn why others are refused."""

from __future__ import annotations

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
from tests.ps.transport import expired
from tests.ps.transport.doubles import (
    LIMIT_S,
    PULL,
    RecordingHandler,
    connected,
    listening,
    raw_client,
    read_all,
    scripted,
)

from fleetlight.errors import DeadlineError, MembershipError, PeerLostError
from fleetlight.ps.messages import Done, Heartbeat, Leave, MetricsRequest, Pulled
from fleetlight.ps.transport import Listener, SocketChannel, connect_all, session
from fleetlight.ps.transport.interface import RetryPolicy
from fleetlight.ps.transport.memory.memory_budget import UNLIMITED
from fleetlight.ps.transport.session import ConnectionLimits, Session
from fleetlight.security.context import client_context, server_context
from fleetlight.wire.tls import _BATCH_BYTES, _RECORD_BYTES, TlsWire

SIZES = [300_000, 0, 1, 16383, 16384, 16385, 5 << 20]


@pytest.fixture
def server(certificates: Path) -> Iterator[Listener]:
    with listening(RecordingHandler(), server_context(certificates), first_s=5.0) as listener:
        yield listener


def refusal(listener: Listener, tls: ssl.SSLContext | None) -> str:
    """The error of a client that the server refuses."""
    with pytest.raises(MembershipError) as caught:
        SocketChannel.connect(
            listener.address, "server 0", deadline_s=5.0, tls=tls, greeting=lambda: Heartbeat(0)
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
def test_arrays_of_any_size_round_trip(server: Listener, certificates: Path, size: int) -> None:
    with connected(server.address, tls=client_context(certificates)) as channel:
        channel.call(Leave())
        sent = [np.arange(size) % 251, np.arange(size // 3).astype(np.uint8)]
        for _ in range(2):
            reply = channel.call(PULL, sent)
            assert reply.message == Pulled(1, 1)
            for sent_array, got in zip(sent, reply.arrays, strict=True):
                np.testing.assert_array_equal(sent_array, got)


def test_large_arrays_neither_stall_nor_fill_memory(
    server: Listener, certificates: Path, monkeypatch: pytest.MonkeyPatch
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
    with connected(server.address, tls=client_context(certificates)) as channel:
        channel.call(Leave())
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
            channel.call(MetricsRequest())
        with connected(server.address, tls=tls) as channel:
            assert channel.call(Heartbeat(0)).message == Done()
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
            channel.call(MetricsRequest(), deadline_s=0.1)
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
    server: Listener,
    certificates: Path,
    other_certificates: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for_client, for_server = REFUSED[client]
    with caplog.at_level(logging.WARNING, "fleetlight"):
        text = refusal(server, client(certificates, other_certificates))
        server.stop()
    assert text.startswith(("server 0 (127.0.0.1", "no connection with server 0 (127.0.0.1"))
    assert for_client in text
    (line,) = (record.getMessage() for record in caplog.records)
    assert for_server in line
    assert server._handler.seen == []  # type: ignore[attr-defined]


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
        text = refusal(listener, expired.context(folder, "client"))
    assert for_client in text
    (line,) = (record.getMessage() for record in caplog.records)
    assert for_server in line


def test_a_tls_client_of_a_plain_server_is_refused(
    certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fleetlight"), listening(RecordingHandler()) as plain:
        text = refusal(plain, client_context(certificates))
    assert "the other side does not use TLS; give --ssl DIR" in text
    (line,) = (record.getMessage() for record in caplog.records)
    assert "a TLS hello; one side uses ssl and the other does not" in line


def test_a_server_at_an_uncertified_address_is_refused(certificates: Path) -> None:
    server = Listener(("127.0.0.2", 0), RecordingHandler(), tls=server_context(certificates))
    try:
        text = refusal(server, client_context(certificates))
    finally:
        server.stop()
    assert "names other hosts (IP address mismatch" in text
    assert "fleetlight cert DIR --host NAME" in text


def test_a_plain_request_to_a_tls_port_is_logged(
    server: Listener, certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fleetlight"):
        with raw_client(server.address) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
            read_all(raw)
        with connected(server.address, tls=client_context(certificates)) as channel:
            assert channel.call(PULL).message == Pulled(1, 1)
        # a session logs its end after it has closed the connection
        server.stop()
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
