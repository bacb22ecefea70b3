# SPDX-License-Identifier: Apache-2.0
"""Strangers at the door of a worker cost it little, and keep nobody out."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from tests.collective.encrypted.members import LIMIT_S, each, linked

from fleetlight.collective.encrypted.acceptor import HandshakeLimits, Introduction, TlsAcceptor
from fleetlight.collective.encrypted.links import Links
from fleetlight.collective.encrypted.process_group import EncryptedGroup
from fleetlight.security.context import client_context, server_context
from fleetlight.wire.tls import TlsWire

HELLO = Introduction("g", 1)


class Inside:
    """Who has been let in."""

    def __init__(self) -> None:
        self.came: list[tuple[Introduction, TlsWire]] = []
        self._arrival = threading.Semaphore(0)

    def __call__(self, introduction: Introduction, wire: TlsWire) -> None:
        self.came.append((introduction, wire))
        self._arrival.release()

    def wait(self) -> tuple[Introduction, TlsWire]:
        assert self._arrival.acquire(timeout=LIMIT_S)
        return self.came[-1]


@contextlib.contextmanager
def opened(
    folder: Path, limits: HandshakeLimits | None = None
) -> Iterator[tuple[TlsAcceptor, Inside, int]]:
    listener, inside = socket.create_server(("127.0.0.1", 0)), Inside()
    port = listener.getsockname()[1]
    door = TlsAcceptor(listener, server_context(folder), inside, limits)
    try:
        yield door, inside, port
    finally:
        door.close()
        for _, wire in inside.came:
            wire.close()


def called(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), LIMIT_S)


def said(introduction: Introduction) -> bytes:
    text = msgspec.msgpack.encode(introduction)
    return len(text).to_bytes(2, "big") + text


def known(folder: Path, port: int, words: bytes) -> ssl.SSLSocket:
    """A member that says this once it has shown its certificate."""
    found = client_context(folder).wrap_socket(called(port), server_hostname="127.0.0.1")
    found.sendall(words)
    return found


def hangs_up(raw: socket.socket) -> bool:
    """Whether the door closes a connection before the test's patience is over."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while raw.recv(1 << 10):
            pass
    return True


def test_a_member_is_let_in_and_what_follows_its_introduction_is_kept(certificates: Path) -> None:
    words = bytearray(11)
    with (
        opened(certificates) as (_, inside, port),
        known(certificates, port, said(HELLO) + b"first words"),
    ):
        introduction, wire = inside.wait()
        wire.read_all(memoryview(words), "words", LIMIT_S)
    assert (introduction, bytes(words)) == (HELLO, b"first words")


def test_an_introduction_may_come_byte_by_byte(certificates: Path) -> None:
    with opened(certificates) as (_, inside, port), known(certificates, port, b"") as member:
        for byte in said(HELLO):
            member.sendall(bytes([byte]))
        assert inside.wait()[0] == HELLO


def test_members_meet_while_many_strangers_say_nothing(certificates: Path) -> None:
    """Sixteen of them once held all threads that did handshakes, each for twenty seconds."""
    limit_s = 15.0
    with linked(certificates, 2) as links, contextlib.ExitStack() as strangers:
        for start in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01") * 20:
            for link in links:
                raw = strangers.enter_context(socket.create_connection(link.address, LIMIT_S))
                raw.sendall(start)
        groups = [EncryptedGroup(link, "g", link.index, [0, 1], limit_s) for link in links]

        def reduce(group: EncryptedGroup) -> float:
            tensor = torch.ones(3)
            group.allreduce([tensor]).wait()
            return float(tensor.sum())

        assert each([lambda g=g: reduce(g) for g in groups]) == [6.0, 6.0]  # type: ignore[misc]
        for group in groups:
            group.shutdown()


def test_strangers_make_room_the_silent_ones_first(
    certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = HandshakeLimits(pending=2, silent_s=0.0, slow_s=0.0)
    with caplog.at_level(logging.WARNING, "fleetlight"), opened(certificates, limits) as opening:
        door, inside, port = opening
        with called(port) as talker, called(port) as silent:
            talker.sendall(b"\x16\x03\x01\x02\x00")
            _until(lambda: any(one.has_sent for one in door._pending))
            with known(certificates, port, said(HELLO)):
                assert hangs_up(silent)
                assert inside.wait()[0] == HELLO
            assert [one.has_sent for one in door._pending] == [True]
    line = caplog.records[0].getMessage()
    assert "refused a connection from 127.0.0.1: it sent nothing, and after 0." in line


def test_one_in_the_middle_of_its_handshake_has_longer(certificates: Path) -> None:
    limits = HandshakeLimits(pending=1, silent_s=0.0, slow_s=0.4)
    with opened(certificates, limits) as (door, inside, port), called(port) as slow:
        slow.sendall(b"\x16")
        _until(lambda: any(one.has_sent for one in door._pending))
        began = door._pending[0].began
        with known(certificates, port, said(HELLO)):
            assert inside.wait()[0] == HELLO
            assert time.monotonic() >= began + 0.4
        assert hangs_up(slow)


def _until(holds: object) -> None:
    deadline = threading.Event()
    for _ in range(int(LIMIT_S * 100)):
        if holds():  # type: ignore[operator]
            return
        deadline.wait(0.01)
    raise AssertionError("it never came")


def test_who_finds_no_room_waits_and_nobody_is_turned_away(certificates: Path) -> None:
    """Until the first stranger has had its time, the kernel keeps the others."""
    limits = HandshakeLimits(pending=1, silent_s=0.3)
    with opened(certificates, limits) as (door, inside, port), called(port) as silent:
        _until(lambda: door._pending)
        with known(certificates, port, said(HELLO)):
            assert inside.wait()[0] == HELLO
        assert hangs_up(silent)


def test_who_does_not_say_who_it_is_has_to_go(
    certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "fleetlight"),
        opened(certificates, HandshakeLimits(first_s=0.2)) as (_, _, port),
    ):
        with called(port) as silent:
            assert hangs_up(silent)
        with called(port) as mute:
            mute.sendall(b"\x16\x03\x01\x02\x00")
            assert hangs_up(mute)
    lines = [record.getMessage() for record in caplog.records]
    expected = "refused a connection from 127.0.0.1: it did not introduce itself within 0.2 s"
    assert lines == [expected] * 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not use TLS"),
        (b"", "it closed the connection"),
    ],
    ids=["another protocol", "nothing"],
)
def test_who_speaks_no_tls_is_refused(
    certificates: Path, words: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fleetlight")
    with opened(certificates) as (_, inside, port), called(port) as raw:
        raw.sendall(words)
        raw.shutdown(socket.SHUT_WR)
        assert hangs_up(raw)
    assert why in caplog.text
    assert not inside.came


@pytest.mark.parametrize(
    ("words", "why"),
    [(b"\xff\xff", "an introduction of 65535 bytes, expected"), (b"\x00\x01\xc1", "MessagePack")],
)
def test_an_introduction_that_makes_no_sense(
    certificates: Path, words: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fleetlight")
    with opened(certificates) as (_, inside, port), known(certificates, port, words) as member:
        assert hangs_up(member)
    assert why in caplog.text
    assert not inside.came


def test_who_calls_twice_has_the_later_connection(certificates: Path) -> None:
    with linked(certificates, 2) as links:
        one, other = links
        first, second = (one.to("g", 1, LIMIT_S) for _ in range(2))
        _until(lambda: len(_incoming(other)) == 1 and first.has_ended())
        found = other.of("g", 0, LIMIT_S)
        second.write([b"words"], "words", LIMIT_S)
        words = bytearray(5)
        found.read_all(memoryview(words), "words", LIMIT_S)
        for wire in (first, second, found):
            wire.close()
    assert bytes(words) == b"words"


def _incoming(links: Links) -> object:
    return links._incoming


def test_closing_ends_everything(certificates: Path) -> None:
    with opened(certificates) as (door, _, port), called(port) as silent:
        _until(lambda: door._pending)
        door.close()
        door.close()
        assert hangs_up(silent)
    with pytest.raises(OSError, match="refused"):
        called(port)
