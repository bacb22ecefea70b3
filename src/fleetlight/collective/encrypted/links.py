# SPDX-License-Identifier: Apache-2.0
"""TLS connections between workers: one for each process group, pair and direction.

The sender opens the connection, so a thread that sends and a thread that receives never share a TLS
session. A connection opens at its first use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from fleetlight.collective.membership.diagnosis import PeerConnectionError
from fleetlight.errors import DeadlineError, FleetError
from fleetlight.observe.log import logger
from fleetlight.roles.role import Endpoint, endpoint_text
from fleetlight.wire.descriptors import ACCEPT_PAUSE_S, CANNOT_ACCEPT, OUT_OF_DESCRIPTORS
from fleetlight.wire.forking import keep_from_children, keep_port_from_children
from fleetlight.wire.tls import TlsWire

#: the longest introduction
_INTRODUCTION_BYTES = 4096
_LENGTH_BYTES = 2
_END_S = 5.0


class Introduction(msgspec.Struct, frozen=True):
    """The first message of a worker on a connection that it has opened."""

    group: str
    sender: int


@dataclasses.dataclass(frozen=True)
class HandshakeLimits:
    """Limits for connections before their introduction; further ones wait in the kernel's queue."""

    #: the most connections without an introduction
    pending: int = 128
    #: after this time, a new connection may replace one that has sent nothing
    silent_s: float = 1.0
    #: after this time, it may replace one during its handshake, maybe a worker on a busy machine
    slow_s: float = 5.0
    #: the longest time for handshake and introduction
    first_s: float = 20.0


class _PendingConnection:
    """A connection before its introduction."""

    def __init__(self, accepted: socket.socket, host: str, tls: ssl.SSLContext) -> None:
        self.socket, self.host = accepted, host
        self.wire = TlsWire(accepted, f"a process on {host}")
        self.wire.begin_handshake(tls)
        self.began = time.monotonic()
        self.has_sent = False
        self._is_secure = False
        self._received = b""

    def advance(self) -> Introduction | None:
        """Continue with the bytes that have arrived; returns the introduction when complete."""
        self.has_sent = self.wire.read_handshake() or self.has_sent
        self._is_secure = self._is_secure or self.wire.advance_handshake()
        while self._is_secure and (missing := self._missing()) > 0:
            some = self.wire.read_some(missing)
            if not some:
                return None
            self._received += some
        if not self._is_secure:
            return None
        return msgspec.msgpack.decode(self._received[_LENGTH_BYTES:], type=Introduction)

    def _missing(self) -> int:
        """The number of bytes missing from the introduction."""
        if len(self._received) < _LENGTH_BYTES:
            return _LENGTH_BYTES - len(self._received)
        length = int.from_bytes(self._received[:_LENGTH_BYTES], "big")
        if length > _INTRODUCTION_BYTES:
            raise msgspec.DecodeError(
                f"an introduction of {length} bytes, expected at most {_INTRODUCTION_BYTES}"
            )
        return _LENGTH_BYTES + length - len(self._received)


class TlsAcceptor:
    """Listens, and passes on connections that have introduced themselves."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext,
        on_introduced: Callable[[Introduction, TlsWire], None],
        limits: HandshakeLimits | None = None,
    ) -> None:
        self._listener, self._tls, self._on_introduced = listener, tls, on_introduced
        self._limits = limits or HandshakeLimits()
        listener.setblocking(False)
        keep_from_children(listener)
        self._pending: list[_PendingConnection] = []
        self._paused_until = 0.0
        self._closing = False
        self._wake, self._waked = socket.socketpair()
        for end in (self._wake, self._waked):
            keep_from_children(end)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._waked, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="fleet-tls-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close pending connections; calling it twice is fine."""
        self._closing = True
        self._wake.close()
        self._thread.join(_END_S)

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._listen_if_room()
                for key, _ in self._selector.select(self._timeout_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is not self._waked:
                        self._advance(key.data)
                self._drop_late()
        finally:
            for caller in self._pending:
                caller.wire.close()
            self._selector.close()
            self._listener.close()
            self._waked.close()

    def _listen_if_room(self) -> None:
        """Leave connections in the kernel's queue while there is no room for them."""
        listens = self._listener in self._selector.get_map()
        has_room = len(self._pending) < self._limits.pending or self._replaceable() is not None
        if (has_room and time.monotonic() >= self._paused_until) == listens:
            return
        if listens:
            self._selector.unregister(self._listener)
        else:
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _timeout_s(self) -> float | None:
        """The time until the next limit; None without one."""
        next_at = math.inf
        if self._pending:
            next_at = min(caller.began for caller in self._pending) + self._limits.first_s
            if len(self._pending) >= self._limits.pending and self._replaceable() is None:
                next_at = min(map(self._kept_until, self._pending))
        now = time.monotonic()
        if self._paused_until > now:
            next_at = min(next_at, self._paused_until)
        return None if next_at == math.inf else max(0.0, next_at - now)

    def _accept(self) -> None:
        try:
            accepted, (host, *_) = self._listener.accept()
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS:
                logger.warning(CANNOT_ACCEPT, error.strerror)
                self._paused_until = time.monotonic() + ACCEPT_PAUSE_S
            return
        if len(self._pending) >= self._limits.pending and (caller := self._replaceable()):
            silent = "" if caller.has_sent else "it sent nothing, and "
            self._refuse(caller, f"{silent}after {_age(caller):.1f} s a new connection replaced it")
        keep_from_children(accepted)
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller = _PendingConnection(accepted, host, self._tls)
        self._pending.append(caller)
        self._selector.register(accepted, selectors.EVENT_READ, caller)

    def _replaceable(self) -> _PendingConnection | None:
        """The connection that a new one may replace; None where none may go yet."""
        now = time.monotonic()
        long = [caller for caller in self._pending if now >= self._kept_until(caller)]
        return min(long, key=lambda caller: (caller.has_sent, caller.began), default=None)

    def _kept_until(self, caller: _PendingConnection) -> float:
        limits = self._limits
        return caller.began + (limits.slow_s if caller.has_sent else limits.silent_s)

    def _advance(self, caller: _PendingConnection) -> None:
        if caller not in self._pending:
            return  # closed a moment ago
        try:
            introduction = caller.advance()
        except (FleetError, msgspec.MsgspecError) as error:
            self._refuse(caller, str(error))
            return
        if introduction is not None:
            self._forget(caller)
            self._on_introduced(introduction, caller.wire)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.wire.has_unsent else 0)
        if self._selector.get_key(caller.socket).events != wanted:
            self._selector.modify(caller.socket, wanted, caller)

    def _drop_late(self) -> None:
        for caller in [one for one in self._pending if _age(one) >= self._limits.first_s]:
            self._refuse(caller, f"it did not introduce itself within {self._limits.first_s:g} s")

    def _refuse(self, caller: _PendingConnection, why: str) -> None:
        if not self._closing:
            logger.warning("refused a connection from %s: %s", caller.host, why)
        self._forget(caller)
        caller.wire.close()

    def _forget(self, caller: _PendingConnection) -> None:
        self._pending.remove(caller)
        self._selector.unregister(caller.socket)


def _age(caller: _PendingConnection) -> float:
    return time.monotonic() - caller.began


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
