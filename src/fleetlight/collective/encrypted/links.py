# SPDX-License-Identifier: Apache-2.0
"""TLS connections between workers: one for each process group, pair and direction.

The worker that sends opens the connection, so a thread that sends and a thread that receives never
share a TLS session. A connection opens when it is used for the first time.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from fleetlight.errors import DeadlineError, FleetError
from fleetlight.observe.log import logger
from fleetlight.roles.role import Endpoint, endpoint_text
from fleetlight.sockets.forking import keep_from_children, keep_port_from_children
from fleetlight.wire.tls import TlsWire

#: torch's name for the backend whose groups run over these
ENCRYPTED = "fleet_tls"
_HANDSHAKES = 8
_HANDSHAKE_S = 20.0
_LOOK_EVERY_MS = 500
#: no introduction is longer
_INTRODUCTION_BYTES = 4096


class LinkError(RuntimeError):
    """A connection of an encrypted process group failed."""


class Introduction(msgspec.Struct, frozen=True):
    """What a worker says first on a connection that it has opened."""

    group: str
    sender: int


class Links:
    """This worker's end of all connections."""

    def __init__(
        self,
        index: int,
        listener: socket.socket,
        *,
        as_server: ssl.SSLContext,
        as_client: ssl.SSLContext,
    ) -> None:
        self.index = index
        host, port = listener.getsockname()[:2]
        #: where this worker listens
        self.address: Endpoint = (host, port)
        #: where each worker listens
        self.endpoints: Mapping[int, Endpoint] = {}
        self._as_server, self._as_client = as_server, as_client
        self._listener = listener
        keep_from_children(listener)
        keep_port_from_children(port)
        self._incoming: dict[Introduction, TlsWire] = {}
        self._arrival = threading.Condition()
        self._closing = threading.Event()
        self._handshakes = ThreadPoolExecutor(_HANDSHAKES, "fleet-tls-handshake")
        self._thread = threading.Thread(target=self._accept, name="fleet-tls-accept", daemon=True)
        self._thread.start()

    def to(self, group: str, receiver: int, limit_s: float) -> TlsWire:
        """A connection on which this worker sends."""
        peer = f"worker {receiver}"
        endpoint = self.endpoints[receiver]
        try:
            connected = socket.create_connection(endpoint, timeout=limit_s)
        except OSError as error:
            raise LinkError(
                f"no connection with {peer} at {endpoint_text(endpoint)}: "
                f"{error.strerror or 'timed out'}"
            ) from None
        keep_from_children(connected)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = TlsWire(connected, peer)
        said = msgspec.msgpack.encode(Introduction(group, self.index))
        try:
            wire.shake_hands(self._as_client, limit_s, endpoint[0])
            wire.write([len(said).to_bytes(2, "big") + said], "an introduction", limit_s)
        except FleetError as error:
            wire.close()
            raise link_error(error) from None
        return wire

    def of(self, group: str, sender: int, limit_s: float) -> TlsWire:
        """The connection on which a worker sends to this one, once that worker has opened it."""
        wanted, end = Introduction(group, sender), time.monotonic() + limit_s
        with self._arrival:
            while wanted not in self._incoming:
                left = end - time.monotonic()
                if left <= 0:
                    raise LinkError(
                        f"timed out: worker {sender} opened no connection within {limit_s:g} s"
                    )
                if self._closing.is_set():
                    raise LinkError("the connections of this worker are closed")
                self._arrival.wait(left)
            return self._incoming.pop(wanted)

    def close(self) -> None:
        """Stop listening and close what nobody has asked for; twice is fine."""
        self._closing.set()
        with contextlib.suppress(OSError):
            # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * _LOOK_EVERY_MS / 1000)
        self._listener.close()
        self._handshakes.shutdown(wait=False, cancel_futures=True)
        with self._arrival:
            for wire in self._incoming.values():
                wire.close()
            self._incoming.clear()
            self._arrival.notify_all()

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._closing.is_set():
            if not poll.poll(_LOOK_EVERY_MS):
                continue
            try:
                accepted, caller = self._listener.accept()
            except OSError:
                continue
            keep_from_children(accepted)
            with contextlib.suppress(RuntimeError):  # the pool is closed
                self._handshakes.submit(self._take_in, accepted, caller[0])

    def _take_in(self, accepted: socket.socket, caller: str) -> None:
        wire = TlsWire(accepted, f"a process on {caller}")
        end = time.monotonic() + _HANDSHAKE_S
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.shake_hands(self._as_server, _HANDSHAKE_S)
            introduction = _introduction(wire, end)
        except (FleetError, OSError, msgspec.MsgspecError) as error:
            if not self._closing.is_set():
                logger.warning("refused a connection from %s: %s", caller, error)
            wire.close()
            return
        wire.peer = f"worker {introduction.sender}"
        with self._arrival:
            self._incoming[introduction] = wire
            self._arrival.notify_all()


def _introduction(wire: TlsWire, until: float) -> Introduction:
    size = bytearray(2)
    wire.read_all(memoryview(size), "an introduction", _HANDSHAKE_S, until)
    length = int.from_bytes(size, "big")
    if length > _INTRODUCTION_BYTES:
        raise msgspec.DecodeError(f"an introduction of {length} bytes, expected at most 4096")
    said = bytearray(length)
    wire.read_all(memoryview(said), "an introduction", _HANDSHAKE_S, until)
    return msgspec.msgpack.decode(said, type=Introduction)


def link_error(error: FleetError) -> LinkError:
    """The error of a connection as torch's groups raise it."""
    late = "timed out: " if isinstance(error, DeadlineError) else ""
    return LinkError(f"{late}{error}")
