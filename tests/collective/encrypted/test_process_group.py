# SPDX-License-Identifier: Apache-2.0
"""Encrypted links, and groups on them that compute what torch's groups compute."""

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from tests.collective.encrypted.members import LIMIT_S, each, linked
from torch import Tensor

from fleetlight.collective.encrypted.collectives import SMALL_BYTES
from fleetlight.collective.encrypted.links import (
    HandshakeLimits,
    Introduction,
    LinkError,
    Links,
    TlsAcceptor,
)
from fleetlight.collective.encrypted.process_group import EncryptedGroup
from fleetlight.security.context import client_context, server_context
from fleetlight.wire.tls import TlsWire

HELLO = Introduction("g", 1)


class AcceptedMembers:
    """Records the accepted members."""

    def __init__(self) -> None:
        self.members: list[tuple[Introduction, TlsWire]] = []
        self._arrival = threading.Semaphore(0)

    def __call__(self, introduction: Introduction, wire: TlsWire) -> None:
        self.members.append((introduction, wire))
        self._arrival.release()

    def wait(self) -> tuple[Introduction, TlsWire]:
        assert self._arrival.acquire(timeout=LIMIT_S)
        return self.members[-1]


@contextlib.contextmanager
def opened(
    folder: Path, limits: HandshakeLimits | None = None
) -> Iterator[tuple[TlsAcceptor, AcceptedMembers, int]]:
    listener, accepted = socket.create_server(("127.0.0.1", 0)), AcceptedMembers()
    port = listener.getsockname()[1]
    acceptor = TlsAcceptor(listener, server_context(folder), accepted, limits)
    try:
        yield acceptor, accepted, port
    finally:
        acceptor.close()
        for _, wire in accepted.members:
            wire.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), LIMIT_S)


def framed(introduction: Introduction) -> bytes:
    text = msgspec.msgpack.encode(introduction)
    return len(text).to_bytes(2, "big") + text


def connect_as_member(folder: Path, port: int, words: bytes) -> ssl.SSLSocket:
    """A member that sends these bytes after its handshake."""
    found = client_context(folder).wrap_socket(connect(port), server_hostname="127.0.0.1")
    found.sendall(words)
    return found


def is_closed(raw: socket.socket) -> bool:
    """Whether the acceptor closes a connection within the socket's timeout."""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while raw.recv(1 << 10):
            pass
    return True


def test_a_member_is_accepted_with_bytes_after_its_introduction(certificates: Path) -> None:
    words = bytearray(11)
    with (
        opened(certificates) as (_, accepted, port),
        connect_as_member(certificates, port, framed(HELLO) + b"first words"),
    ):
        introduction, wire = accepted.wait()
        wire.read_all(memoryview(words), "words", LIMIT_S)
    assert (introduction, bytes(words)) == (HELLO, b"first words")


def test_an_introduction_may_arrive_byte_by_byte(certificates: Path) -> None:
    with (
        opened(certificates) as (_, accepted, port),
        connect_as_member(certificates, port, b"") as member,
    ):
        for byte in framed(HELLO):
            member.sendall(bytes([byte]))
        assert accepted.wait()[0] == HELLO


def test_silent_strangers_do_not_delay_members(certificates: Path) -> None:
    """Sixteen strangers once held all handshake threads, each for twenty seconds."""
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


def test_silent_connections_are_evicted_first(
    certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = HandshakeLimits(pending=2, silent_s=0.0, slow_s=0.0)
    with (
        caplog.at_level(logging.WARNING, "fleetlight"),
        opened(certificates, limits) as opened_acceptor,
    ):
        acceptor, accepted, port = opened_acceptor
        with connect(port) as talker, connect(port) as silent:
            talker.sendall(b"\x16\x03\x01\x02\x00")
            _until(lambda: any(one.has_sent for one in acceptor._pending))
            with connect_as_member(certificates, port, framed(HELLO)):
                assert is_closed(silent)
                assert accepted.wait()[0] == HELLO
            assert [one.has_sent for one in acceptor._pending] == [True]
    line = caplog.records[0].getMessage()
    assert "refused a connection from 127.0.0.1: it sent nothing, and after 0." in line


def test_a_started_handshake_gets_more_time(certificates: Path) -> None:
    limits = HandshakeLimits(pending=1, silent_s=0.0, slow_s=0.4)
    with opened(certificates, limits) as (acceptor, accepted, port), connect(port) as slow:
        slow.sendall(b"\x16")
        _until(lambda: any(one.has_sent for one in acceptor._pending))
        began = acceptor._pending[0].began
        with connect_as_member(certificates, port, framed(HELLO)):
            assert accepted.wait()[0] == HELLO
            assert time.monotonic() >= began + 0.4
        assert is_closed(slow)


def _until(holds: object) -> None:
    deadline = threading.Event()
    for _ in range(int(LIMIT_S * 100)):
        if holds():  # type: ignore[operator]
            return
        deadline.wait(0.01)
    raise AssertionError("it never came")


def test_a_member_waits_in_the_backlog_when_all_slots_are_taken(certificates: Path) -> None:
    """The kernel's backlog keeps the member until the stranger's time is over."""
    limits = HandshakeLimits(pending=1, silent_s=0.3)
    with opened(certificates, limits) as (acceptor, accepted, port), connect(port) as silent:
        _until(lambda: acceptor._pending)
        with connect_as_member(certificates, port, framed(HELLO)):
            assert accepted.wait()[0] == HELLO
        assert is_closed(silent)


def test_a_connection_without_introduction_is_closed(
    certificates: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING, "fleetlight"),
        opened(certificates, HandshakeLimits(first_s=0.2)) as (_, _, port),
    ):
        with connect(port) as silent:
            assert is_closed(silent)
        with connect(port) as mute:
            mute.sendall(b"\x16\x03\x01\x02\x00")
            assert is_closed(mute)
    lines = [record.getMessage() for record in caplog.records]
    expected = "refused a connection from 127.0.0.1: it did not introduce itself within 0.2 s"
    assert lines == [expected] * 2


@pytest.mark.parametrize(
    ("words", "why"),
    [(b"GET / HTTP/1.1\r\n\r\n", "does not use TLS"), (b"", "it closed the connection")],
    ids=["another protocol", "nothing"],
)
def test_a_connection_without_tls_is_refused(
    certificates: Path, words: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fleetlight")
    with opened(certificates) as (_, accepted, port), connect(port) as raw:
        raw.sendall(words)
        raw.shutdown(socket.SHUT_WR)
        assert is_closed(raw)
    assert why in caplog.text
    assert not accepted.members


@pytest.mark.parametrize(
    ("words", "why"),
    [(b"\xff\xff", "an introduction of 65535 bytes, expected"), (b"\x00\x01\xc1", "MessagePack")],
)
def test_an_invalid_introduction_is_refused(
    certificates: Path, words: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fleetlight")
    with (
        opened(certificates) as (_, accepted, port),
        connect_as_member(certificates, port, words) as member,
    ):
        assert is_closed(member)
    assert why in caplog.text
    assert not accepted.members


def test_a_second_connection_replaces_the_first(certificates: Path) -> None:
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


def test_closing_ends_all_connections(certificates: Path) -> None:
    with opened(certificates) as (acceptor, _, port), connect(port) as silent:
        _until(lambda: acceptor._pending)
        acceptor.close()
        acceptor.close()
        assert is_closed(silent)
    with pytest.raises(OSError, match="refused"):
        connect(port)


# `EncryptedGroup` computes what torch's groups compute, for any size and number of members.

SIZES = [1, 5, SMALL_BYTES // 4 + 3]


@contextlib.contextmanager
def groups(folder: Path, count: int, limit_s: float = LIMIT_S) -> Iterator[list[EncryptedGroup]]:
    with linked(folder, count) as links:
        members = [EncryptedGroup(link, "0", link.index, range(count), limit_s) for link in links]
        try:
            yield members
        finally:
            for group in members:
                group.shutdown()


def on_all(folder: Path, count: int, act: Callable[[EncryptedGroup, int], Any]) -> list[Any]:
    """Returns the result of `act` on each member."""
    with groups(folder, count) as members:
        return each([lambda g=g, i=i: act(g, i) for i, g in enumerate(members)])  # type: ignore[misc]


def values(index: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(index)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_sums_are_correct_and_bit_identical(certificates: Path, count: int, size: int) -> None:
    def act(group: EncryptedGroup, index: int) -> Tensor:
        tensor = values(index, size)
        group.allreduce([tensor]).wait()
        return tensor

    sums = on_all(certificates, count, act)
    expected = torch.stack([values(i, size).double() for i in range(count)]).sum(0)
    torch.testing.assert_close(sums[0].double(), expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(one, sums[0]) for one in sums)


@pytest.mark.parametrize(
    ("op", "of"),
    [
        (dist.ReduceOp.MAX, lambda t: t.max(0).values),
        (dist.ReduceOp.MIN, lambda t: t.min(0).values),
        (dist.ReduceOp.AVG, lambda t: t.mean(0)),
        (dist.ReduceOp.PRODUCT, lambda t: t.prod(0)),
    ],
)
@pytest.mark.parametrize("count", [2, 3])
def test_other_reductions_are_correct(
    certificates: Path, count: int, op: Any, of: Callable[[Tensor], Tensor]
) -> None:
    def act(group: EncryptedGroup, index: int) -> Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        tensor = values(index, 7)
        group.allreduce([tensor], options).wait()
        return tensor

    expected = of(torch.stack([values(i, 7) for i in range(count)]))
    for one in on_all(certificates, count, act):
        torch.testing.assert_close(one, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.uint8])
def test_all_types_are_summed(certificates: Path, dtype: torch.dtype) -> None:
    def act(group: EncryptedGroup, index: int) -> Tensor:
        tensor = torch.full((3, 2), index + 1, dtype=dtype)
        group.allreduce([tensor]).wait()
        return tensor

    for one in on_all(certificates, 3, act):
        assert torch.equal(one, torch.full((3, 2), 6, dtype=dtype))


def test_views_complex_tensors_and_scalars_are_summed(certificates: Path) -> None:
    def act(group: EncryptedGroup, index: int) -> tuple[Tensor, Tensor, Tensor]:
        view = torch.ones(4, 6)[:, ::2]
        number = torch.full((2,), complex(1, index))
        scalar = torch.tensor(2.0)
        for tensor in (view, number, scalar):
            group.allreduce([tensor]).wait()
        return view, number, scalar

    for view, number, scalar in on_all(certificates, 2, act):
        assert torch.equal(view, torch.full((4, 3), 2.0))
        assert torch.equal(number, torch.full((2,), 2 + 1j))
        assert scalar == 4


def test_sparse_gradients_are_summed(certificates: Path) -> None:
    def act(group: EncryptedGroup, index: int) -> Tensor:
        row = torch.sparse_coo_tensor([[index, 3]], torch.ones(2, 2), (4, 2), check_invariants=True)
        group.allreduce([row]).wait()
        return row.to_dense()

    expected = torch.tensor([[1.0, 1], [1, 1], [0, 0], [2, 2]])
    for one in on_all(certificates, 2, act):
        assert torch.equal(one, expected)


@pytest.mark.parametrize("count", [2, 3])
def test_gather_and_scatter_operations(certificates: Path, count: int) -> None:
    def act(group: EncryptedGroup, index: int) -> dict[str, Any]:
        mine = torch.tensor([index, index])
        gathered = [torch.zeros(2, dtype=torch.int64) for _ in range(count)]
        group.allgather([gathered], [mine]).wait()
        flat = torch.zeros(count * 2, dtype=torch.int64)
        group.all_gather_single(flat, mine).wait()
        part = torch.zeros(1, dtype=torch.int64)
        group.reduce_scatter_single(part, torch.arange(count) + index).wait()
        given = torch.zeros(count, dtype=torch.int64)
        group.all_to_all_single(given, torch.arange(count) * 10 + index).wait()
        return {"list": torch.cat(gathered), "flat": flat, "part": part, "given": given}

    for index, one in enumerate(on_all(certificates, count, act)):
        gathered = torch.arange(count).repeat_interleave(2)
        assert torch.equal(one["list"], gathered)
        assert torch.equal(one["flat"], gathered)
        assert one["part"].item() == count * index + sum(range(count))
        assert torch.equal(one["given"], torch.arange(count) + index * 10)


def test_broadcast_reduce_send_and_recv(certificates: Path) -> None:
    def act(group: EncryptedGroup, index: int) -> list[Any]:
        given = torch.tensor([float(index)])
        group.broadcast(given, 2).wait()
        summed = torch.tensor([float(index)])
        group.reduce(summed, 1).wait()
        passed = torch.zeros(1)
        group.send([torch.tensor([index + 10.0])], (index + 1) % 3)
        group.recv([passed], (index - 1) % 3).wait()
        group.barrier().wait()
        return [given.item(), summed.item(), passed.item()]

    assert on_all(certificates, 3, act) == [[2, 0, 12], [2, 3, 10], [2, 2, 11]]


def test_a_future_returns_the_tensors(certificates: Path) -> None:
    def act(group: EncryptedGroup, index: int) -> Tensor:
        (tensor,) = group.allreduce([torch.ones(2)]).get_future().wait()
        return tensor

    for one in on_all(certificates, 2, act):
        assert torch.equal(one, torch.full((2,), 2.0))


def test_a_lost_member_ends_the_wait(certificates: Path) -> None:
    with groups(certificates, 2) as (first, second):
        each([lambda g=g: g.barrier().wait() for g in (first, second)])  # type: ignore[misc]
        second.shutdown()
        work = first.allreduce([torch.ones(3)])
        with pytest.raises(LinkError, match="worker 1"):
            work.wait()
        with pytest.raises(LinkError, match="worker 1"):
            first.barrier().wait()


def test_a_silent_member_is_named_at_the_deadline(certificates: Path) -> None:
    with (
        groups(certificates, 2, limit_s=0.3) as (first, _),
        pytest.raises(LinkError, match=r"timed out: worker 1 opened no connection within 0\.3 s"),
    ):
        first.allreduce([torch.ones(3)]).wait()
