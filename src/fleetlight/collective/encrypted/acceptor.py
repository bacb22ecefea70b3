# SPDX-License-Identifier: Apache-2.0
"""`TlsAcceptor`: where other workers call. One thread drives the handshakes of all callers.

A caller costs no thread until it has shown its certificate and said who it is. So those that say
nothing keep nobody out, and `HandshakeLimits` bound what they can take.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable

import msgspec

from fleetlight.errors import FleetError
from fleetlight.observe.log import logger
from fleetlight.wire.forking import keep_from_children
from fleetlight.wire.tls import TlsWire

#: no introduction is longer
_INTRODUCTION_BYTES = 4096
_LENGTH_BYTES = 2
_END_S = 5.0
#: what accept says when the process or the system has no room for another connection
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_ROOM_S = 0.5


class Introduction(msgspec.Struct, frozen=True):
    """What a worker says first on a connection that it has opened."""

    group: str
    sender: int


@dataclasses.dataclass(frozen=True)
class HandshakeLimits:
    """What a worker grants to those who call; further ones wait in the kernel's queue."""

    #: callers that have not said yet who they are
    strangers: int = 128
    #: after that time one that has said nothing makes room for the next
    silent_s: float = 1.0
    #: the same for one in the middle of its handshake, which may be a worker on a busy machine
    slow_s: float = 5.0
    #: how long one may take where nobody needs its room
    first_s: float = 20.0


class _PendingConnection:
    """A connection whose other side is not known yet."""

    def __init__(self, accepted: socket.socket, host: str, tls: ssl.SSLContext) -> None:
        self.socket, self.host = accepted, host
        self.wire = TlsWire(accepted, f"a process on {host}")
        self.wire.begin_handshake(tls)
        self.began = time.monotonic()
        self.has_spoken = False
        self._is_secure = False
        self._said = b""

    def advance(self) -> Introduction | None:
        """Go on by what has come; who it is, once it has said so."""
        self.has_spoken = self.wire.read_handshake() or self.has_spoken
        self._is_secure = self._is_secure or self.wire.advance_handshake()
        while self._is_secure and (missing := self._missing()) > 0:
            some = self.wire.read_some(missing)
            if not some:
                return None
            self._said += some
        if not self._is_secure:
            return None
        return msgspec.msgpack.decode(self._said[_LENGTH_BYTES:], type=Introduction)

    def _missing(self) -> int:
        """How many bytes of its introduction have not come."""
        if len(self._said) < _LENGTH_BYTES:
            return _LENGTH_BYTES - len(self._said)
        length = int.from_bytes(self._said[:_LENGTH_BYTES], "big")
        if length > _INTRODUCTION_BYTES:
            raise msgspec.DecodeError(
                f"an introduction of {length} bytes, expected at most {_INTRODUCTION_BYTES}"
            )
        return _LENGTH_BYTES + length - len(self._said)


class TlsAcceptor:
    """Listens, and hands over the connections of those who have said who they are."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext,
        let_in: Callable[[Introduction, TlsWire], None],
        limits: HandshakeLimits | None = None,
    ) -> None:
        self._listener, self._tls, self._let_in = listener, tls, let_in
        self._limits = limits or HandshakeLimits()
        listener.setblocking(False)
        keep_from_children(listener)
        self._callers: list[_PendingConnection] = []
        self._shut_until = 0.0
        self._closing = False
        self._wake, self._waked = socket.socketpair()
        for end in (self._wake, self._waked):
            keep_from_children(end)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._waked, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="fleet-tls-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and hang up on those who are not known yet; twice is fine."""
        self._closing = True
        self._wake.close()
        self._thread.join(_END_S)

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._listen_or_not()
                for key, _ in self._selector.select(self._rest_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is not self._waked:
                        self._advance(key.data)
                self._drop_late()
        finally:
            for caller in self._callers:
                caller.wire.close()
            self._selector.close()
            self._listener.close()
            self._waked.close()

    def _listen_or_not(self) -> None:
        """Whoever finds no room waits in the kernel's queue."""
        listens = self._listener in self._selector.get_map()
        has_room = len(self._callers) < self._limits.strangers or self._in_the_way() is not None
        if (has_room and time.monotonic() >= self._shut_until) == listens:
            return
        if listens:
            self._selector.unregister(self._listener)
        else:
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _rest_s(self) -> float | None:
        """When there is something to do even if nobody says anything."""
        next_at = math.inf
        if self._callers:
            next_at = min(caller.began for caller in self._callers) + self._limits.first_s
            if len(self._callers) >= self._limits.strangers and self._in_the_way() is None:
                next_at = min(map(self._stays_until, self._callers))
        now = time.monotonic()
        if self._shut_until > now:
            next_at = min(next_at, self._shut_until)
        return None if next_at == math.inf else max(0.0, next_at - now)

    def _accept(self) -> None:
        try:
            accepted, (host, *_) = self._listener.accept()
        except OSError as error:
            if error.errno in _NO_ROOM:
                logger.warning("no further connection can be taken in: %s", error.strerror)
                self._shut_until = time.monotonic() + _NO_ROOM_S
            return
        if len(self._callers) >= self._limits.strangers and (caller := self._in_the_way()):
            silent = "" if caller.has_spoken else "it said nothing, and "
            self._refuse(caller, f"{silent}after {_age(caller):.1f} s others needed its room")
        keep_from_children(accepted)
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller = _PendingConnection(accepted, host, self._tls)
        self._callers.append(caller)
        self._selector.register(accepted, selectors.EVENT_READ, caller)

    def _in_the_way(self) -> _PendingConnection | None:
        """Who has to go first where there is no room for another; None: nobody yet."""
        now = time.monotonic()
        long = [caller for caller in self._callers if now >= self._stays_until(caller)]
        return min(long, key=lambda caller: (caller.has_spoken, caller.began), default=None)

    def _stays_until(self, caller: _PendingConnection) -> float:
        limits = self._limits
        return caller.began + (limits.slow_s if caller.has_spoken else limits.silent_s)

    def _advance(self, caller: _PendingConnection) -> None:
        if caller not in self._callers:
            return  # it had to go a moment ago
        try:
            introduction = caller.advance()
        except (FleetError, msgspec.MsgspecError) as error:
            self._refuse(caller, str(error))
            return
        if introduction is not None:
            self._forget(caller)
            self._let_in(introduction, caller.wire)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.wire.has_unsent else 0)
        if self._selector.get_key(caller.socket).events != wanted:
            self._selector.modify(caller.socket, wanted, caller)

    def _drop_late(self) -> None:
        for caller in [one for one in self._callers if _age(one) >= self._limits.first_s]:
            self._refuse(caller, f"it had not said who it is within {self._limits.first_s:g} s")

    def _refuse(self, caller: _PendingConnection, why: str) -> None:
        if not self._closing:
            logger.warning("refused a connection from %s: %s", caller.host, why)
        self._forget(caller)
        caller.wire.close()

    def _forget(self, caller: _PendingConnection) -> None:
        self._callers.remove(caller)
        self._selector.unregister(caller.socket)


def _age(caller: _PendingConnection) -> float:
    return time.monotonic() - caller.began
