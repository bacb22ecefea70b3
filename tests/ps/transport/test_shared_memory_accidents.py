# SPDX-License-Identifier: Apache-2.0
"""Shared memory of a peer that errs, is killed or has no memory: usual errors, or the socket."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
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

from fleetlight.errors import PeerError, PeerLostError
from fleetlight.ps.messages import Heartbeat, MetricsRequest, ShareMemory
from fleetlight.ps.transport import Listener, SocketChannel
from fleetlight.ps.transport.interface import RetryPolicy
from fleetlight.ps.transport.memory.body_slots import file_bytes
from fleetlight.wire import shared_memory
from fleetlight.wire.shared_memory import MemoryOffer, new_shared_memory

pytestmark = pytest.mark.skipif(not shared_memory.IS_AVAILABLE, reason="needs Linux")
SLOT = 1 << 20
FULL = file_bytes(SLOT)


def floats(size: int, value: float) -> Any:
    return np.full(size // 4, value, np.float32)


@contextlib.contextmanager
def sharing(address: Any) -> Iterator[tuple[SocketChannel, list[str]]]:
    """A channel that does not reconnect, and the reasons why it shares no memory."""
    why: list[str] = []
    with connected(address, on_sharing=why.append, retry=RetryPolicy(0.0)) as channel:
        channel.call(Heartbeat(0))
        yield channel, why


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
    with listening(RecordingHandler()) as server, sharing(server.address) as (channel, why):
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
    with sharing(address) as (channel, _):
        channel.call(PULL, [floats(SLOT, 1)])
        assert channel._frames is not None
        memory = channel._frames.output((SLOT // 4,), "float32")
        assert memory is not None
        memory[: SLOT // 8] = 7
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.multiprocess
def test_a_server_killed_while_it_writes_a_reply_is_lost() -> None:
    with served_elsewhere(_serve_half) as address, sharing(address) as (channel, why):
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
        with sharing(server.address) as (channel, _):
            assert (channel.call(PULL, [floats(SLOT, 2)]).arrays[0] == 2).all()
