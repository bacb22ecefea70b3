# SPDX-License-Identifier: Apache-2.0
"""Messages of doctors over a `Wire`: length, then JSON; and the proof of the token before them."""

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

#: of one message; the longest tells what was found between 64 machines
MOST_BYTES = 4 << 20
#: of a message of the proof
_MOST_UNPROVED_BYTES = 1 << 12
_LENGTH = struct.Struct("!I")
_OPERATION = "a message"

_requests = msgspec.json.Decoder(Request)
_replies = msgspec.json.Decoder(Reply)


class DoctorChannel:
    """One connection to another doctor, `peer` by name."""

    def __init__(self, connected: socket.socket, peer: str, limit_s: float) -> None:
        """No single message may take longer than `limit_s`."""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self.peer = peer
        self.limit_s = limit_s
        self._wire = Wire(connected, peer)

    def say(self, message: Request | Reply) -> None:
        """Send one message."""
        data = msgspec.json.encode(message)
        until = time.monotonic() + self.limit_s
        try:
            self._wire.write([_LENGTH.pack(len(data)), data], _OPERATION, self.limit_s, until)
        except DeadlineError:
            raise self._late("took no message") from None

    def request(self, most: int = MOST_BYTES) -> Request | None:
        """What the other asks, None when it has hung up."""
        return self._received(_requests, most=most)

    def ask(self, request: Request, kind: type[T], more_s: float = 0.0) -> T:
        """Send a request and return the reply, for which the other may need `more_s`."""
        self.say(request)
        return self.answer(kind, more_s)

    def answer(self, kind: type[T], more_s: float = 0.0) -> T:
        """The reply to an earlier request."""
        reply = self.reply(more_s)
        if not isinstance(reply, kind):
            got = "nothing" if reply is None else type(reply).__name__
            raise ProtocolError(f"{self.peer} answered with {got}, expected {kind.__name__}")
        return reply

    def reply(self, more_s: float = 0.0) -> Reply | None:
        """Any reply but a refusal, which is an error; None when the other has hung up."""
        reply = self._received(_replies, more_s)
        if isinstance(reply, Refused):
            raise ProtocolError(f"{self.peer} refused: {reply.why}")
        return reply

    @contextlib.contextmanager
    def raw(self) -> Iterator[socket.socket]:
        """The socket itself, for a measurement with timeouts of its own."""
        try:
            yield self._socket
        finally:
            # the timeouts of a `Wire` are the kernel's
            with contextlib.suppress(OSError):
                self._socket.settimeout(None)

    def introduce(self, token: Secret, own: str, to: str) -> None:
        """Prove to the doctor at `to` that this one knows the token; it does the same."""
        ProofExchange(self.peer, self.say, self.reply).prove(token, _greeting(own, to), sent=b"")

    def admit(self, token: Secret | None, caller: str, own: str) -> Request | None:
        """The first request of a doctor that belongs here; None when it hangs up or is refused."""
        first = self.request(_MOST_UNPROVED_BYTES)
        if first is None:
            return None
        try:
            exchange = ProofExchange("the caller", self.say, self._request_or_lost)
            exchange.admit(first, token, "this doctor", _greeting(caller, own))
        except MembershipError as error:
            self.say(Refused(str(error)))
            return None
        return self.request() if isinstance(first, AuthRequest) else first

    def _request_or_lost(self) -> Request:
        request = self.request(_MOST_UNPROVED_BYTES)
        if request is None:
            raise PeerLostError(f"{self.peer} went away when it was asked for a proof")
        return request

    def _received(
        self, decoder: msgspec.json.Decoder[T], more_s: float = 0.0, most: int = MOST_BYTES
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
            raise self._late("did not answer") from None
        try:
            return decoder.decode(data or b"")
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(
                f"{self.peer} said something that is no doctor's message ({error}); is another "
                "version of fleetlight installed there?"
            ) from None

    def _read(self, count: int, until: float) -> bytes | None:
        """So many bytes, None where the connection is over before the first."""
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
        """Hang up."""
        with contextlib.suppress(OSError):
            self._socket.close()


def _greeting(own: str, to: str) -> bytes:
    return f"doctor {own} to {to}".encode()


def dial(address: str, port: int, own: str, limit_s: float) -> DoctorChannel:
    """A connection from an own address to a doctor; OSError where there is none."""
    connected = socket.create_connection((address, port), limit_s, (own, 0))
    return DoctorChannel(connected, f"{address}:{port}", limit_s)
