# SPDX-License-Identifier: Apache-2.0
"""TLS connections between workers: one for each process group, pair and direction.

The sender opens the connection, so a thread that sends and a thread that receives never share a TLS
session. A connection opens at its first use.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Mapping

import msgspec

from fleetlight.collective.encrypted.acceptor import HandshakeLimits, Introduction, TlsAcceptor
from fleetlight.collective.membership.diagnosis import PeerConnectionError
from fleetlight.errors import DeadlineError, FleetError
from fleetlight.roles.role import Endpoint, endpoint_text
from fleetlight.wire.forking import keep_from_children, keep_port_from_children
from fleetlight.wire.tls import TlsWire

#: the name under which torch knows the backend
ENCRYPTED = "fleet_tls"


class LinkError(PeerConnectionError):
    """A connection of an encrypted process group failed."""


class Links:
    """This worker's TLS connections to all others."""

    def __init__(
        self,
        index: int,
        listener: socket.socket,
        *,
        as_server: ssl.SSLContext,
        as_client: ssl.SSLContext,
        limits: HandshakeLimits | None = None,
    ) -> None:
        self.index = index
        host, port = listener.getsockname()[:2]
        #: where this worker listens
        self.address: Endpoint = (host, port)
        #: where each worker listens
        self.endpoints: Mapping[int, Endpoint] = {}
        self._as_client = as_client
        keep_port_from_children(port)
        self._incoming: dict[Introduction, TlsWire] = {}
        self._arrival = threading.Condition()
        self._closing = threading.Event()
        self._acceptor = TlsAcceptor(listener, as_server, self._on_introduced, limits)

    def to(self, group: str, receiver: int, limit_s: float) -> TlsWire:
        """Open a connection on which this worker sends."""
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
            wire.handshake(self._as_client, limit_s, endpoint[0])
            wire.write([len(said).to_bytes(2, "big") + said], "an introduction", limit_s)
        except FleetError as error:
            wire.close()
            raise link_error(error) from None
        return wire

    def of(self, group: str, sender: int, limit_s: float) -> TlsWire:
        """Wait for the connection on which another worker sends to this one."""
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
        """Stop listening and close unused connections; calling it twice is fine."""
        self._closing.set()
        self._acceptor.close()
        with self._arrival:
            for wire in self._incoming.values():
                wire.close()
            self._incoming.clear()
            self._arrival.notify_all()

    def _on_introduced(self, introduction: Introduction, wire: TlsWire) -> None:
        wire.peer = f"worker {introduction.sender}"
        with self._arrival:
            earlier = self._incoming.pop(introduction, None)
            self._incoming[introduction] = wire
            self._arrival.notify_all()
        if earlier is not None:
            earlier.close()


def link_error(error: FleetError) -> LinkError:
    """Turn an error of a connection into one that torch's groups raise."""
    late = "timed out: " if isinstance(error, DeadlineError) else ""
    return LinkError(f"{late}{error}")
