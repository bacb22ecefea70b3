# SPDX-License-Identifier: Apache-2.0
"""Messages of doctors over a `Wire`, as length and JSON, after a proof of the token."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from fleetlight.errors import DeadlineError, MembershipError, PeerLostError, ProtocolError
from fleetlight.launch.doctor.messages import Refused, Reply, Request
from fleetlight.roles.secret import Secret
from fleetlight.security.token import AuthRequest, ProofExchange
from fleetlight.wire.plain import Wire

T = TypeVar("T")

#: the largest message; the results of 64 machines fit
MAX_BYTES = 4 << 20
#: the largest message before the proof is complete
_MAX_UNPROVED_BYTES = 1 << 12
_LENGTH = struct.Struct("!I")
_OPERATION = "a message"

_requests = msgspec.json.Decoder(Request)
_replies = msgspec.json.Decoder(Reply)


class DoctorChannel:
    """A connection to another doctor."""

    def __init__(self, connected: socket.socket, peer: str, limit_s: float) -> None:
        """`peer` names the other doctor in errors; each message has `limit_s`."""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self.peer = peer
        self.limit_s = limit_s
        self._wire = Wire(connected, peer)

    def send(self, message: Request | Reply) -> None:
        """Send one message."""
        data = msgspec.json.encode(message)
        until = time.monotonic() + self.limit_s
        try:
            self._wire.write([_LENGTH.pack(len(data)), data], _OPERATION, self.limit_s, until)
        except DeadlineError:
            raise self._late("accepted no message") from None

    def receive_request(self, most: int = MAX_BYTES) -> Request | None:
        """The next request, None if the peer closed the connection."""
        return self._receive(_requests, most=most)

    def call(self, request: Request, kind: type[T], more_s: float = 0.0) -> T:
        """Send a request and return its reply, which may take `more_s` longer."""
        self.send(request)
        return self.receive(kind, more_s)

    def receive(self, kind: type[T], more_s: float = 0.0) -> T:
        """The reply to an earlier request."""
        reply = self.receive_reply(more_s)
        if not isinstance(reply, kind):
            got = "nothing" if reply is None else type(reply).__name__
            raise ProtocolError(f"{self.peer} replied with {got}, expected {kind.__name__}")
        return reply

    def receive_reply(self, more_s: float = 0.0) -> Reply | None:
        """The next reply, None if the peer closed the connection; a refusal is an error."""
        reply = self._receive(_replies, more_s)
        if isinstance(reply, Refused):
            raise ProtocolError(f"{self.peer} refused: {reply.why}")
        return reply

    @contextlib.contextmanager
    def raw(self) -> Iterator[socket.socket]:
        """The socket, for a measurement with its own timeouts."""
        try:
            yield self._socket
        finally:
            # a `Wire` uses the kernel's timeouts
            with contextlib.suppress(OSError):
                self._socket.settimeout(None)

    def introduce(self, token: Secret, own: str, to: str) -> None:
        """Exchange proofs of the token with the doctor at `to`."""
        exchange = ProofExchange(self.peer, self.send, self.receive_reply)
        exchange.prove(token, _greeting(own, to), sent=b"")

    def admit(self, token: Secret | None, caller: str, own: str) -> Request | None:
        """The first request of a doctor of this job; None if it leaves or is refused."""
        first = self.receive_request(_MAX_UNPROVED_BYTES)
        if first is None:
            return None
        try:
            exchange = ProofExchange("the caller", self.send, self._request_or_lost)
            exchange.admit(first, token, "this doctor", _greeting(caller, own))
        except MembershipError as error:
            self.send(Refused(str(error)))
            return None
        return self.receive_request() if isinstance(first, AuthRequest) else first

    def _request_or_lost(self) -> Request:
        request = self.receive_request(_MAX_UNPROVED_BYTES)
        if request is None:
            raise PeerLostError(
                f"{self.peer} disconnected instead of proving that it has the token"
            )
        return request

    def _receive(
        self, decoder: msgspec.json.Decoder[T], more_s: float = 0.0, most: int = MAX_BYTES
    ) -> T | None:
        until = time.monotonic() + self.limit_s + more_s
        try:
            start = self._read(_LENGTH.size, until)
            if start is None:
                return None
            (length,) = _LENGTH.unpack(start)
            if length > most:
                raise ProtocolError(
                    f"{self.peer} announced {length} bytes, expected a doctor's message; does "
                    "another program use this port?"
                )
            data = self._read(length, until) if length else b""
        except DeadlineError:
            raise self._late("did not reply") from None
        try:
            return decoder.decode(data or b"")
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(
                f"{self.peer} sent an invalid doctor's message ({error}); is another "
                "version of fleetlight installed there?"
            ) from None

    def _read(self, count: int, until: float) -> bytes | None:
        """Read `count` bytes; None if the connection ends before the first."""
        data = memoryview(bytearray(count))
        limit_s = until - time.monotonic()
        began = self._wire.read(data, _OPERATION, limit_s, until)
        if not began:
            return None
        self._wire.read_all(data[began:], _OPERATION, limit_s, until)
        return bytes(data)

    def _late(self, what: str) -> DeadlineError:
        return DeadlineError(f"{self.peer} {what} within {self.limit_s:g} s")

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._socket.close()


def _greeting(own: str, to: str) -> bytes:
    return f"doctor {own} to {to}".encode()


def dial(address: str, port: int, own: str, limit_s: float) -> DoctorChannel:
    """Connect from the address `own` to a doctor; raise OSError on failure."""
    connected = socket.create_connection((address, port), limit_s, (own, 0))
    return DoctorChannel(connected, f"{address}:{port}", limit_s)
