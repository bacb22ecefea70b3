# SPDX-License-Identifier: Apache-2.0
"""Shared memory: sealed, and passed to one process that has the ticket."""

import contextlib
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fleetlight.errors import PeerError
from fleetlight.wire import shared_memory
from fleetlight.wire.shared_memory import (
    MemoryOffer,
    map_shared_memory,
    new_shared_memory,
    take_descriptor,
)

pytestmark = pytest.mark.skipif(not shared_memory.IS_AVAILABLE, reason="needs Linux")
SIZE, LIMIT_S = 8192, 20.0


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = new_shared_memory(SIZE)
    yield made
    os.close(made)


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The connection over which the peer would refuse an offer."""
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_two_maps_have_the_same_bytes(descriptor: int) -> None:
    one, other = map_shared_memory(descriptor, SIZE), map_shared_memory(descriptor, SIZE)
    one[5:8] = b"abc"
    assert other[5:8] == b"abc"


@pytest.mark.parametrize("size", [0, SIZE // 2, 2 * SIZE])
def test_size_of_memory_is_sealed(descriptor: int, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, size)


def test_memory_of_another_size_is_refused(descriptor: int) -> None:
    with pytest.raises(PeerError, match=r"sealed memory of 8192 bytes, expected .* 4096 bytes"):
        map_shared_memory(descriptor, SIZE // 2)


def test_unsealed_memory_is_refused() -> None:
    made = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(made, SIZE)
    try:
        with pytest.raises(PeerError, match="got unsealed memory"):
            map_shared_memory(made, SIZE)
    finally:
        os.close(made)


def test_offer_passes_the_descriptor_to_the_peer(
    descriptor: int, connection: tuple[socket.socket, socket.socket]
) -> None:
    with contextlib.closing(MemoryOffer()) as offer, ThreadPoolExecutor(1) as peer:
        taking = peer.submit(take_descriptor, offer.name, offer.ticket, LIMIT_S)
        assert offer.pass_to_peer(descriptor, connection[0].fileno(), LIMIT_S)
        taken = taking.result(LIMIT_S)
    try:
        assert os.fstat(taken).st_ino == os.fstat(descriptor).st_ino
        assert not os.get_inheritable(taken)
    finally:
        os.close(taken)


def test_offer_ignores_a_caller_without_the_ticket(
    descriptor: int, connection: tuple[socket.socket, socket.socket]
) -> None:
    with contextlib.closing(MemoryOffer()) as offer, ThreadPoolExecutor(1) as threads:
        passing = threads.submit(offer.pass_to_peer, descriptor, connection[0].fileno(), LIMIT_S)
        with pytest.raises((PeerError, OSError)):
            take_descriptor(offer.name, bytes(16), LIMIT_S)
        os.close(take_descriptor(offer.name, offer.ticket, LIMIT_S))
        assert passing.result(LIMIT_S)


def test_offer_ends_when_the_peer_replies_on_the_connection(
    descriptor: int, connection: tuple[socket.socket, socket.socket]
) -> None:
    with contextlib.closing(MemoryOffer()) as offer:
        connection[1].send(b"no")
        assert not offer.pass_to_peer(descriptor, connection[0].fileno(), LIMIT_S)


def test_offer_ends_at_its_deadline(
    descriptor: int, connection: tuple[socket.socket, socket.socket]
) -> None:
    with contextlib.closing(MemoryOffer()) as offer, pytest.raises(TimeoutError, match=r"0\.01 s"):
        offer.pass_to_peer(descriptor, connection[0].fileno(), 0.01)


def test_offer_of_another_user_is_refused(
    descriptor: int,
    connection: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with contextlib.closing(MemoryOffer()) as offer, ThreadPoolExecutor(1) as threads:
        passing = threads.submit(offer.pass_to_peer, descriptor, connection[0].fileno(), LIMIT_S)
        with monkeypatch.context() as patch:
            patch.setattr(shared_memory, "_user", lambda connected: os.geteuid() + 1)
            with pytest.raises(PeerError, match="another user offers"):
                take_descriptor(offer.name, offer.ticket, LIMIT_S)
        os.close(take_descriptor(offer.name, offer.ticket, LIMIT_S))
        assert passing.result(LIMIT_S)


@pytest.mark.parametrize(
    ("name", "ticket"),
    [("../../run/docker.sock", bytes(16)), ("", bytes(16)), ("0" * 32, b"short")],
)
def test_malformed_offers_are_refused(name: str, ticket: bytes) -> None:
    with pytest.raises(PeerError, match="malformed"):
        take_descriptor(name, ticket, LIMIT_S)


def test_memory_has_no_name_and_needs_no_shm(descriptor: int) -> None:
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:fleetlight")
