# SPDX-License-Identifier: Apache-2.0
"""Memory shared with a server on the same host, and its accidents."""

import contextlib
import errno
import fcntl
import functools
import mmap
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ps.transport.doubles import (
    LIMIT_S,
    PULL,
    RecordingHandler,
    connected,
    listening,
    served_elsewhere,
)

from fleetlight.errors import PeerError, PeerLostError, PlanError, ProtocolError
from fleetlight.ps.messages import FetchDense, Heartbeat, MetricsRequest, ShareMemory
from fleetlight.ps.transport import Listener, SocketChannel
from fleetlight.ps.transport import memory_sharing as sharing
from fleetlight.ps.transport.interface import RetryPolicy
from fleetlight.ps.transport.memory.body_slots import MIN_BYTES, SLOTS, BodySlots, file_bytes
from fleetlight.roles.secret import Secret
from fleetlight.security.context import client_context, server_context
from fleetlight.wire import shared_memory
from fleetlight.wire.shared_memory import MemoryOffer, new_shared_memory

# Connections that share memory: the same replies, and the same errors, as without.


pytestmark = pytest.mark.skipif(not shared_memory.IS_AVAILABLE, reason="needs Linux")


def floats(size: int, value: float = 1.0) -> Any:
    return np.full(size // 4, value, np.float32)


@contextlib.contextmanager
def sharing_channel(address: Any, **options: Any) -> Iterator[tuple[SocketChannel, list[str]]]:
    """A channel, and the reasons why it shares no memory ('': it does)."""
    reported: list[str] = []
    with connected(address, on_sharing=reported.append, **options) as channel:
        channel.call(Heartbeat(0))
        yield channel, reported


def slots_of(channel: SocketChannel) -> Any:
    assert channel._frames is not None
    return channel._frames.slots


@pytest.mark.parametrize("size", [MIN_BYTES, 300_000, 3 << 20])
def test_arrays_round_trip_through_slots(size: int) -> None:
    with listening(RecordingHandler()) as server, sharing_channel(server.address) as (channel, why):
        for value in range(2 * SLOTS):
            sent = [np.arange(value), floats(size, value), np.array(2.5)]
            reply = channel.call(PULL, sent)
            for array, got in zip(sent, reply.arrays, strict=True):
                np.testing.assert_array_equal(array, got)
        assert why == [""]
        # the wire carried the first reply at most
        assert slots_of(channel) is not None
        assert channel._frames is not None
        assert channel._frames.largest_body == 0


def test_small_bodies_share_nothing() -> None:
    with listening(RecordingHandler()) as server, sharing_channel(server.address) as (channel, why):
        channel.call(PULL, [floats(MIN_BYTES // 2)])
        assert (slots_of(channel), why) == (None, [])


def test_slots_grow_with_the_bodies() -> None:
    with listening(RecordingHandler()) as server, sharing_channel(server.address) as (channel, _):
        sizes, kept = [], []
        for size in (MIN_BYTES, 1 << 20, 4 << 20, 1 << 20):
            kept.append(channel.call(PULL, [floats(size, size)]).arrays[0])
            sizes.append(slots_of(channel).slot_bytes)
        assert sizes == [256 << 10, 1 << 20, 4 << 20, 4 << 20]
        # arrays in the earlier, smaller memory are still there
        assert [array[0] for array in kept] == [MIN_BYTES, 1 << 20, 4 << 20, 1 << 20]


def test_the_socket_carries_bodies_while_all_slots_are_in_use() -> None:
    with listening(RecordingHandler()) as server, sharing_channel(server.address) as (channel, _):
        kept = [channel.call(PULL, [floats(1 << 20, n)]).arrays[0] for n in range(3 * SLOTS)]
        assert [int(array[-1]) for array in kept] == list(range(3 * SLOTS))
        assert channel._frames is not None
        assert channel._frames.largest_body == 1 << 20


def test_replies_alone_may_be_large() -> None:
    large = floats(1 << 20, 3.0)

    class LargeReplies(RecordingHandler):
        def __call__(self, connection: Any, message: Any, arrays: Any) -> Any:
            reply, _ = super().__call__(connection, message, arrays)
            return reply, [large]

    with listening(LargeReplies()) as server, sharing_channel(server.address) as (channel, why):
        for _ in range(3):
            np.testing.assert_array_equal(channel.call(PULL).arrays[0], large)
        assert why == [""]


class Writing(RecordingHandler):
    """Writes the arrays of a reply, twice those of the request, where the connection says."""

    def __init__(self) -> None:
        super().__init__()
        #: by reply: whether each array is in memory of the connection
        self.places: list[list[bool]] = []

    def __call__(self, connection: Any, message: Any, arrays: Any) -> Any:
        reply, arrays = super().__call__(connection, message, arrays)
        memory = [connection.output(array.shape, array.dtype.name) for array in arrays]
        self.places.append([one is not None for one in memory])
        return reply, [
            np.multiply(one, 2, out=out) for one, out in zip(arrays, memory, strict=True)
        ]


def test_a_handler_writes_its_reply_in_a_slot() -> None:
    handler = Writing()
    with listening(handler) as server, sharing_channel(server.address) as (channel, _):
        for value in range(2 * SLOTS):
            sent = [np.arange(3), floats(1 << 20, value), np.array([2.5])]
            for array, got in zip(sent, channel.call(PULL, sent).arrays, strict=True):
                np.testing.assert_array_equal(2 * array, got)
        assert handler.places[-2 * SLOTS :] == [[True, True, True]] * 2 * SLOTS
        assert channel._frames is not None
        assert channel._frames.largest_body == 0


def test_a_handler_gets_no_memory_while_all_slots_are_in_use_or_too_small() -> None:
    handler = Writing()
    with listening(handler) as server, sharing_channel(server.address) as (channel, _):
        kept = [channel.call(PULL, [floats(1 << 18, n)]).arrays[0] for n in range(SLOTS + 2)]
        assert [int(array[-1]) for array in kept] == [2 * n for n in range(SLOTS + 2)]
        assert handler.places[-SLOTS - 2 :] == [[True]] * SLOTS + [[False]] * 2


@pytest.mark.parametrize("fails", [ValueError("nonsense"), PlanError("no such table")])
def test_memory_of_a_failed_reply_is_used_again(fails: Exception) -> None:
    class Failing(Writing):
        def __call__(self, connection: Any, message: Any, arrays: Any) -> Any:
            reply = super().__call__(connection, message, arrays)
            if isinstance(message, FetchDense):
                connection.output((1 << 18,), "uint8")
                raise fails
            return reply

    with listening(Failing()) as server, sharing_channel(server.address) as (channel, _):
        for value in range(2 * SLOTS):
            assert (channel.call(PULL, [floats(1 << 18, value)]).arrays[0] == 2 * value).all()
            with pytest.raises(Exception, match=str(fails)):
                channel.call(FetchDense())


def test_a_handler_of_a_socket_gets_no_memory() -> None:
    handler = Writing()
    with listening(handler) as server, connected(server.address) as channel:
        channel.call(Heartbeat(0))
        assert (channel.call(PULL, [floats(1 << 20, 3)]).arrays[0] == 6).all()
    assert handler.places[-1] == [False]


@pytest.mark.parametrize("kind", ["tls", "token"])
def test_authenticated_connections_share_memory(kind: str, certificates: Path) -> None:
    with contextlib.ExitStack() as stack:
        if kind == "tls":
            tls = server_context(certificates)
            server = stack.enter_context(listening(RecordingHandler(), tls=tls))
            options: dict[str, Any] = {"tls": client_context(certificates)}
        else:
            token = Secret("0123456789abcdef0123456789abcdef")
            server = stack.enter_context(listening(RecordingHandler(), token=token))
            options = {"token": token, "greeting": lambda: Heartbeat(0)}
        channel, why = stack.enter_context(sharing_channel(server.address, **options))
        for value in range(5):
            got = channel.call(PULL, [floats(1 << 20, value)]).arrays[0]
            assert (got == value).all()
        assert why == [""]


def refuses(*_: Any) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def is_full(*_: Any) -> None:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize(
    ("module", "name", "double", "reason"),
    [
        (sharing, "new_shared_memory", is_full, "cannot allocate it: Cannot allocate memory"),
        (sharing, "take_descriptor", refuses, "the server cannot map it: Operation not permitted"),
        (sharing, "IS_AVAILABLE", False, "this system has no sealed memory"),
    ],
)
def test_bodies_use_the_socket_where_memory_cannot_be_shared(
    module: Any, name: str, double: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, double)
    with listening(RecordingHandler()) as server, sharing_channel(server.address) as (channel, why):
        for value in range(3):
            assert (channel.call(PULL, [floats(1 << 20, value)]).arrays[0] == value).all()
        assert (slots_of(channel), why) == (None, [reason])


def test_channels_share_nothing_unless_asked() -> None:
    with listening(RecordingHandler()) as server, connected(server.address) as channel:
        channel.call(Heartbeat(0))
        channel.call(PULL, [floats(1 << 20)])
        assert slots_of(channel) is None


def test_a_reconnect_shares_new_memory() -> None:
    with listening(RecordingHandler()) as server, sharing_channel(server.address) as (channel, why):
        first = channel.call(PULL, [floats(1 << 20, 1)]).arrays[0]
        assert channel._frames is not None
        channel._frames.wire.interrupt()
        second = channel.call(PULL, [floats(1 << 20, 2)]).arrays[0]
        assert (first[0], second[0], why) == (1, 2, ["", ""])


def test_a_frame_that_names_another_slot_is_refused() -> None:
    with listening(RecordingHandler()) as server, sharing_channel(server.address) as (channel, _):
        channel.call(PULL, [floats(1 << 20)])
        slots_of(channel).fill = lambda parts, size: SLOTS + 1
        with pytest.raises(ProtocolError, match=r"names slot 4 .* there are 3 slots"):
            channel.call(PULL, [floats(1 << 20)])


def test_a_frame_that_names_a_slot_without_shared_memory_is_refused() -> None:
    with listening(RecordingHandler()) as server, connected(server.address) as channel:
        channel.call(Heartbeat(0))
        assert channel._frames is not None
        memory = mmap.mmap(-1, file_bytes(1 << 20))
        channel._frames.slots = BodySlots(memory, 1 << 20, is_client=True)
        with pytest.raises(ProtocolError, match="names slot 1, but no memory is shared"):
            channel.call(PULL, [floats(1 << 20)])


@pytest.mark.parametrize("name", ["0" * 32, "nonsense"])
def test_an_offer_without_memory_is_refused_and_the_connection_stays(name: str) -> None:
    with listening(RecordingHandler()) as server, connected(server.address) as channel:
        channel.call(Heartbeat(0))
        with pytest.raises(Exception, match=r"cannot map it|malformed"):
            channel.call(ShareMemory(name, bytes(16), 1 << 20))
        channel.call(Heartbeat(0))


def _serve(sender: Any) -> None:
    handler = RecordingHandler()
    handler.on_ask = lambda connection: os.kill(os.getpid(), signal.SIGKILL)
    sender.send(Listener(("127.0.0.1", 0), handler).address)
    signal.pause()


@pytest.mark.multiprocess
def test_killed_server_is_an_error_and_its_arrays_stay() -> None:
    with (
        served_elsewhere(_serve) as address,
        sharing_channel(address, retry=RetryPolicy(0.0)) as (channel, why),
    ):
        kept = channel.call(PULL, [floats(1 << 20, 5)]).arrays[0]
        channel.send(MetricsRequest(), [floats(1 << 20)])
        with pytest.raises(PeerLostError):
            channel.receive(LIMIT_S)
        assert why == [""]
        assert (kept == 5).all()


# Shared memory of a peer that errs, is killed or has no memory: usual errors, or the socket.


SLOT = 1 << 20
FULL = file_bytes(SLOT)
sharing_once = functools.partial(sharing_channel, retry=RetryPolicy(0.0))


def unsealed() -> int:
    made = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(made, FULL)
    return made


def read_only() -> int:
    made = unsealed()
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made


def a_pipe() -> int:
    one, other = os.pipe()
    os.close(other)
    return one


@pytest.mark.parametrize(
    ("descriptor", "reason"),
    [
        (unsealed, f"got unsealed memory of {FULL} bytes, expected sealed"),
        (lambda: new_shared_memory(FULL // 2), f"{FULL // 2} bytes, expected .* {FULL} bytes"),
        (lambda: new_shared_memory(2 * FULL), f"{2 * FULL} bytes, expected .* {FULL} bytes"),
        (read_only, "the server cannot map it: Operation not permitted"),
        (a_pipe, "the server cannot map it: Invalid argument"),
        (lambda: os.open("/dev/null", os.O_RDWR), "the server cannot map it: Invalid argument"),
    ],
    ids=["unsealed", "too small", "too large", "read-only", "a pipe", "a device"],
)
def test_a_descriptor_of_something_else_is_refused(
    descriptor: Callable[[], int], reason: str
) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(listening(RecordingHandler()))
        channel = stack.enter_context(connected(server.address))
        channel.call(Heartbeat(0))
        offer = stack.enter_context(contextlib.closing(MemoryOffer()))
        passed = descriptor()
        stack.callback(os.close, passed)
        quiet, other = socket.socketpair()
        stack.enter_context(quiet)
        stack.enter_context(other)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        pool.submit(offer.pass_to_peer, passed, quiet.fileno(), LIMIT_S)
        with pytest.raises(PeerError, match=reason):
            channel.call(ShareMemory(offer.name, offer.ticket, SLOT))
        # the connection carries everything
        assert (channel.call(PULL, [floats(SLOT, 4)]).arrays[0] == 4).all()


@contextlib.contextmanager
def limited(which: int, most: int) -> Iterator[None]:
    """This process has a limit; what it has already stays."""
    before = resource.getrlimit(which)
    resource.setrlimit(which, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


@pytest.mark.parametrize(
    ("which", "most", "reason"),
    [
        (resource.RLIMIT_FSIZE, 64 << 10, "cannot allocate it: File too large"),
        (resource.RLIMIT_NOFILE, 3, "cannot allocate it: Too many open files"),
    ],
    ids=["size of files", "descriptors"],
)
def test_a_process_at_its_limit_uses_the_socket(which: int, most: int, reason: str) -> None:
    with listening(RecordingHandler()) as server, sharing_once(server.address) as (channel, why):
        with limited(which, most):
            first = channel.call(PULL, [floats(SLOT, 1)]).arrays[0]
        assert why == [reason]
        assert (first == 1).all()
        assert (channel.call(PULL, [floats(SLOT, 2)]).arrays[0] == 2).all()


def _serve_half(sender: Any) -> None:
    class HalfReplies(RecordingHandler):
        """Is killed with half of a reply in the slot."""

        def __call__(self, connection: Any, message: Any, arrays: Any) -> Any:
            if isinstance(message, MetricsRequest):
                connection.output((SLOT // 4,), "float32")[: SLOT // 8] = 7
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__call__(connection, message, arrays)

    sender.send(Listener(("127.0.0.1", 0), HalfReplies()).address)
    signal.pause()


def _send_half(address: Any) -> None:
    with sharing_once(address) as (channel, _):
        channel.call(PULL, [floats(SLOT, 1)])
        assert channel._frames is not None
        memory = channel._frames.output((SLOT // 4,), "float32")
        assert memory is not None
        memory[: SLOT // 8] = 7
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.multiprocess
def test_a_server_killed_while_it_writes_a_reply_is_lost() -> None:
    with served_elsewhere(_serve_half) as address, sharing_once(address) as (channel, why):
        kept = channel.call(PULL, [floats(SLOT, 5)]).arrays[0]
        channel.send(MetricsRequest())
        with pytest.raises(PeerLostError):
            channel.receive(LIMIT_S)
        assert why == [""]
        assert (kept == 5).all()


@pytest.mark.multiprocess
def test_a_worker_killed_while_it_writes_a_request_is_gone() -> None:
    handler = RecordingHandler()
    with listening(handler) as server:
        process = get_context("forkserver").Process(target=_send_half, args=(server.address,))
        process.start()
        process.join(LIMIT_S)
        assert process.exitcode == -signal.SIGKILL
        assert handler.ended.wait(LIMIT_S)
        # nothing of the request arrived
        assert [type(message) for message in handler.seen] == [Heartbeat, type(PULL)]
        with sharing_once(server.address) as (channel, _):
            assert (channel.call(PULL, [floats(SLOT, 2)]).arrays[0] == 2).all()
