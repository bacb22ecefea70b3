# SPDX-License-Identifier: Apache-2.0
"""A connected socket delivers its last message, and partial sends arrive completely."""

import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from tests.ps.transport.doubles import LIMIT_S

from fleetlight.errors import DeadlineError, PeerLostError
from fleetlight.wire.plain import Wire


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a TCP connection: this side's and the peer's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname(), timeout=LIMIT_S)
        mine, _ = listener.accept()
    with mine, theirs:
        yield mine, theirs


def test_linger_delivers_the_last_message_to_a_sending_peer(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    mine, theirs = pair
    theirs.sendall(bytes(100_000))
    wire = Wire(mine, "the peer")
    wire.write([b"because"], "a refusal", LIMIT_S)
    lingering = threading.Thread(target=wire.linger)
    lingering.start()
    theirs.sendall(bytes(100_000))
    # an orderly end, since a reset may drop the message
    message = b""
    while part := theirs.recv(100):
        message += part
    assert message == b"because"
    theirs.close()
    lingering.join(LIMIT_S)
    assert mine.fileno() == -1


@pytest.mark.skipif(sys.platform != "linux", reason="Linux counts the bytes of a connection")
def test_a_connection_counts_its_bytes(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    wire = Wire(mine, "the peer")
    assert wire.bytes_moved() == (0, 0)
    wire.write([b"four"], "a request", LIMIT_S)
    assert theirs.recv(4) == b"four"
    theirs.sendall(b"seven..")
    assert wire.read(memoryview(bytearray(7)), "a reply", LIMIT_S) == 7
    # the peer's bytes acknowledge the four
    assert wire.bytes_moved() == (4, 7)
    mine.close()
    assert wire.bytes_moved() == (0, 0)


@pytest.mark.slow
def test_lingering_ends_without_the_peer(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, _ = pair
    Wire(mine, "the peer").linger()
    assert mine.fileno() == -1


def test_a_wait_can_be_interrupted_by_another_thread(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    mine, _ = pair
    wire = Wire(mine, "the peer")
    ended: list[int] = []
    reader = threading.Thread(target=lambda: ended.append(wire.read(memoryview(bytearray(1)), "x")))
    reader.start()
    wire.interrupt()
    reader.join(LIMIT_S)
    assert ended == [0]


def test_a_wire_closed_by_another_thread_is_lost(pair: tuple[socket.socket, socket.socket]) -> None:
    """Also if the timeout changes, which is set on the socket first."""
    mine, _ = pair
    wire = Wire(mine, "the peer")
    wire.close()
    for silence_s in (LIMIT_S, LIMIT_S, LIMIT_S / 100):
        with pytest.raises(PeerLostError, match="lost the peer during a test: Bad file desc"):
            wire.read(memoryview(bytearray(1)), "a test", silence_s)
        with pytest.raises(PeerLostError, match="lost the peer during a test: Bad file desc"):
            wire.write([b"x"], "a test", silence_s / 2)


def test_a_deadline_ends_a_wait_despite_received_bytes(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    mine, theirs = pair
    theirs.sendall(b"abc")
    wire = Wire(mine, "the peer")
    with pytest.raises(DeadlineError, match=r"the peer was silent for .* s during a test"):
        wire.read_all(memoryview(bytearray(4)), "a test", LIMIT_S, until=time.monotonic() + 0.05)


def test_a_truncated_frame_is_a_lost_peer(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    theirs.sendall(b"abc")
    theirs.close()
    with pytest.raises(PeerLostError, match=r"lost the peer during a test: .* middle of a frame"):
        Wire(mine, "the peer").read_all(memoryview(bytearray(4)), "a test", LIMIT_S)


def test_wait_readable_ends_at_the_first_byte(pair: tuple[socket.socket, socket.socket]) -> None:
    mine, theirs = pair
    wire = Wire(mine, "the peer")
    with pytest.raises(DeadlineError, match=r"the peer was silent for 0\.0 s during an exchange"):
        wire.wait_readable("an exchange", 0.02)
    theirs.sendall(b"xy")
    wire.wait_readable("an exchange", LIMIT_S)
    into = bytearray(2)
    wire.read_all(memoryview(into), "an exchange", LIMIT_S)
    assert into == b"xy"
    theirs.close()
    wire.wait_readable("an exchange", LIMIT_S)  # the end of the connection is readable, too
    wire.close()
    wire.wait_readable("an exchange", LIMIT_S)


def test_has_ended_is_known_before_all_bytes_are_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    mine, theirs = pair
    wire = Wire(mine, "the peer")
    theirs.sendall(b"a request")
    assert not wire.has_ended()
    theirs.close()
    assert wire.has_ended()
    mine.close()
    assert wire.has_ended()
