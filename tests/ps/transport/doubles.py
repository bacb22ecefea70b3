# SPDX-License-Identifier: Apache-2.0
"""A handler that records its requests, misbehaving servers, and raw clients."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from typing import Any

import numpy as np

from fleetlight.errors import PeerError
from fleetlight.ps import messages as m
from fleetlight.ps.transport import Connection, Listener, Reply, SocketChannel
from fleetlight.ps.transport.frames import Frame, Frames
from fleetlight.ps.transport.interface import RetryPolicy
from fleetlight.ps.transport.protocol import Array
from fleetlight.ps.transport.session import ConnectionLimits
from fleetlight.roles.role import Endpoint
from fleetlight.roles.secret import Secret
from fleetlight.wire.plain import Wire

#: far longer than any operation here takes
LIMIT_S = 20.0
PULL = m.Pull([], dense=False)


class RecordingHandler:
    """Replies to a pull with its arrays, to other requests with Done, and records all."""

    def __init__(self) -> None:
        self.seen: list[m.Message] = []
        self.connections: list[Connection] = []
        self.ends: list[PeerError | None] = []
        self.ended = threading.Event()
        #: called for a MetricsRequest
        self.on_ask: Callable[[Connection], None] = lambda connection: None
        #: raised for a Heartbeat
        self.error: Exception | None = None

    def __call__(
        self, connection: Connection, message: m.Message, arrays: Sequence[Array]
    ) -> Reply:
        self.seen.append(message)
        self.connections.append(connection)
        if isinstance(message, m.MetricsRequest):
            self.on_ask(connection)
        if isinstance(message, m.Heartbeat) and self.error is not None:
            raise self.error
        if isinstance(message, m.FetchDense):
            return m.Done(), [np.zeros(2, np.complex64)]
        if isinstance(message, m.Pull):
            return m.Pulled(1, 1), arrays
        return m.Done(), ()

    def gone(self, connection: Connection, error: PeerError | None) -> None:
        self.ends.append(error)
        self.ended.set()


@contextlib.contextmanager
def listening(
    handler: Any, tls: Any = None, token: Secret | None = None, **limits: Any
) -> Iterator[Listener]:
    listener = Listener(
        ("127.0.0.1", 0), handler, tls=tls, token=token, limits=ConnectionLimits(**limits)
    )
    try:
        yield listener
    finally:
        listener.stop()
    for thread in threading.enumerate():
        if thread is listener._thread or getattr(thread, "_handler", None) is handler:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), thread.name


@contextlib.contextmanager
def connected(address: Endpoint, **options: Any) -> Iterator[SocketChannel]:
    channel = SocketChannel.connect(
        address, "server 0", **{"deadline_s": LIMIT_S, "retry": RetryPolicy(1.0), **options}
    )
    try:
        yield channel
    finally:
        channel.close()


def raw_client(address: Endpoint) -> socket.socket:
    """A plain socket connected to a server."""
    return socket.create_connection(address, timeout=LIMIT_S)


def read_all(connection: socket.socket) -> bytes:
    """Read all bytes until the other side closes the connection."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def received(frames: Frames) -> Frame:
    """The next frame; the other side has not closed the connection."""
    frame = frames.receive("a test")
    assert frame is not None
    return frame


def receive_message(raw: socket.socket) -> m.Message:
    """Receive one message over a plain socket."""
    return received(Frames(Wire(raw, "the server"), LIMIT_S)).message


@contextlib.contextmanager
def scripted(*acts: Callable[[socket.socket, Frames], object]) -> Iterator[Endpoint]:
    """A server that plays one act per connection, in order, and closes it."""
    listening_socket = socket.create_server(("127.0.0.1", 0))
    listening_socket.settimeout(LIMIT_S)

    def play() -> None:
        for act in acts:
            raw, _ = listening_socket.accept()
            with raw:
                act(raw, Frames(Wire(raw, "the client"), LIMIT_S))

    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield listening_socket.getsockname()
    finally:
        thread.join(LIMIT_S)
        listening_socket.close()


@contextlib.contextmanager
def served_elsewhere(serve: Callable[[Any], None]) -> Iterator[Any]:
    """The address that a server sends from a process of its own; the test ends the process."""
    receiver, sender = get_context("forkserver").Pipe(duplex=False)
    process = get_context("forkserver").Process(target=serve, args=(sender,))
    process.start()
    try:
        yield receiver.recv()
    finally:
        process.join(LIMIT_S)
