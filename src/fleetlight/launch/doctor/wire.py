# SPDX-License-Identifier: Apache-2.0
"""Messages over a socket: length, then JSON. Every wait ends, and no length is believed blindly."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import TypeVar

import msgspec

from fleetlight.errors import DeadlineError, PeerLostError, ProtocolError
from fleetlight.launch.doctor.messages import Refused, Reply, Request

T = TypeVar("T")

#: longer than what is said of a thousand machines
MOST_BYTES = 4 << 20
_LENGTH = struct.Struct("!I")

_requests = msgspec.json.Decoder(Request)
_replies = msgspec.json.Decoder(Reply)


class Wire:
    """One connection to another doctor, `peer` by name."""

    def __init__(self, connected: socket.socket, peer: str, limit_s: float) -> None:
        """No single message may take longer than `limit_s`."""
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connected
        self.peer = peer
        self.limit_s = limit_s

    def say(self, message: Request | Reply) -> None:
        """Send one message."""
        data = msgspec.json.encode(message)
        self.socket.settimeout(self.limit_s)
        try:
            self.socket.sendall(_LENGTH.pack(len(data)) + data)
        except TimeoutError:
            raise self._late("took no message") from None
        except OSError as error:
            raise PeerLostError(f"{self.peer} went away ({error.strerror or error})") from None

    def request(self, most: int = MOST_BYTES) -> Request | None:
        """What the other asks, None when it has hung up."""
        return self._heard(_requests, most=most)

    def ask(self, request: Request, kind: type[T], more_s: float = 0.0) -> T:
        """Say a request and hear its answer, for which the other may need `more_s`."""
        self.say(request)
        return self.answer(kind, more_s)

    def answer(self, kind: type[T], more_s: float = 0.0) -> T:
        """The answer to what was asked before."""
        reply = self._heard(_replies, more_s)
        if isinstance(reply, Refused):
            raise ProtocolError(f"{self.peer} refused: {reply.why}")
        if not isinstance(reply, kind):
            got = "nothing" if reply is None else type(reply).__name__
            raise ProtocolError(f"{self.peer} answered with {got}, expected {kind.__name__}")
        return reply

    def _heard(
        self, decoder: msgspec.json.Decoder[T], more_s: float = 0.0, most: int = MOST_BYTES
    ) -> T | None:
        end = time.monotonic() + self.limit_s + more_s
        start = self._read(_LENGTH.size, end)
        if start is None:
            return None
        (length,) = _LENGTH.unpack(start)
        if length > most:
            raise ProtocolError(
                f"{self.peer} announced {length} bytes, expected a doctor's message; does another "
                "program use this port?"
            )
        data = self._read(length, end)
        try:
            return decoder.decode(data or b"")
        except (msgspec.DecodeError, RecursionError) as error:
            raise ProtocolError(
                f"{self.peer} said something that is no doctor's message ({error}); is another "
                "version of fleetlight installed there?"
            ) from None

    def _read(self, count: int, end: float) -> bytes | None:
        """So many bytes, None where the connection is over before the first."""
        read = bytearray()
        while len(read) < count:
            chunk = self._chunk(count - len(read), end)
            if not chunk and not read:
                return None
            if not chunk:
                raise PeerLostError(f"{self.peer} hung up in the middle of a message")
            read += chunk
        return bytes(read)

    def _chunk(self, most: int, end: float) -> bytes:
        left = end - time.monotonic()
        if left <= 0:
            raise self._late("did not answer")
        self.socket.settimeout(left)
        try:
            return self.socket.recv(min(most, 1 << 16))
        except TimeoutError:
            raise self._late("did not answer") from None
        except OSError as error:
            raise PeerLostError(f"{self.peer} went away ({error.strerror or error})") from None

    def _late(self, what: str) -> DeadlineError:
        return DeadlineError(f"{self.peer} {what} within {self.limit_s:g} s")

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self.socket.close()


def dial(address: str, port: int, own: str, limit_s: float) -> Wire:
    """A connection from an own address to a doctor; OSError where there is none."""
    connected = socket.create_connection((address, port), limit_s, (own, 0))
    return Wire(connected, f"{address}:{port}", limit_s)
