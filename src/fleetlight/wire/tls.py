# SPDX-License-Identifier: Apache-2.0
"""A wire inside TLS.

OpenSSL works on memory and does not see the socket. So deadlines and interruptions are those of a
plain wire, and one system call transfers many records instead of half of one. No two threads can
enter a session through a shared socket object.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Sequence
from typing import cast

from fleetlight.errors import DeadlineError, MembershipError, PeerError, PeerLostError
from fleetlight.security.tls_errors import explain
from fleetlight.wire.plain import Wire

#: the number of bytes that are encrypted before a send, or read before decryption, at most
_BATCH_BYTES = 256 << 10
#: the longest TLS record
_RECORD_BYTES = 17 << 10
_HANDSHAKE = "the TLS handshake"


class TlsWire(Wire):
    """A TLS connection; one thread at a time may use it."""

    def __init__(self, connected: socket.socket, peer: str) -> None:
        super().__init__(connected, peer)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._scratch = memoryview(bytearray(_BATCH_BYTES))
        #: encrypted bytes that are not sent yet, and the number of plain bytes in them
        self._unsent = memoryview(b"")
        self._stands_for = 0

    def handshake(self, tls: ssl.SSLContext, limit_s: float, host: str | None = None) -> None:
        """Open the session; `host` is the server's name on the client's side, else None."""
        until = time.monotonic() + limit_s
        self._set_step(limit_s, _HANDSHAKE)
        self._session = tls.wrap_bio(
            self._incoming, self._outgoing, server_side=host is None, server_hostname=host
        )
        try:
            while not self._handshake_step(until):
                pass
        except ssl.SSLError as error:
            # send the alert to the other side
            with contextlib.suppress(PeerError):
                self._flush(until)
            raise self._failed(error, _HANDSHAKE) from None
        except DeadlineError as error:
            if host is None:
                raise
            raise DeadlineError(f"{error}; does it listen without TLS?") from None
        self._flush(until)

    def begin_handshake(self, tls: ssl.SSLContext) -> None:
        """Start the server's side of a handshake without blocking."""
        self._session = tls.wrap_bio(self._incoming, self._outgoing, server_side=True)

    def read_handshake(self) -> bool:
        """Read bytes of the handshake without blocking; True if some arrived."""
        try:
            count = self._socket.recv_into(self._scratch[:_RECORD_BYTES], 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._failed(error, _HANDSHAKE) from None
        if not count:
            raise self.lost(_HANDSHAKE, "it closed the connection")
        self._incoming.write(self._scratch[:count])
        return True

    def advance_handshake(self) -> bool:
        """Continue the handshake without blocking; True if it is complete."""
        try:
            self._session.do_handshake()
            is_done = True
        except ssl.SSLWantReadError:
            is_done = False
        except ssl.SSLError as error:
            # send the alert to the other side
            with contextlib.suppress(PeerError):
                self._send_pending()
            raise self._failed(error, _HANDSHAKE) from None
        self._send_pending()
        return is_done and not self.has_unsent

    def read_some(self, most: int) -> bytes:
        """Read plain bytes without blocking; empty if none arrived."""
        try:
            some = self._session.read(most)
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError as error:
            raise self._failed(error, _HANDSHAKE) from None
        if not some:
            raise self.lost(_HANDSHAKE, "it closed the connection")
        return some

    @property
    def has_unsent(self) -> bool:
        """True while the kernel has not accepted all bytes of the handshake."""
        return bool(self._unsent)

    def _send_pending(self) -> None:
        self._unsent = memoryview(bytes(self._unsent) + self._outgoing.read())
        try:
            if self._unsent:
                sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._failed(error, _HANDSHAKE) from None

    def _handshake_step(self, until: float) -> bool:
        try:
            self._session.do_handshake()
        except ssl.SSLWantReadError:
            self._flush(until)
            self._wait(_HANDSHAKE, until - time.monotonic(), self._fetch, 0)
            return False
        return True

    def _flush(self, until: float) -> None:
        """Send what OpenSSL has written on its own."""
        self._unsent = memoryview(self._outgoing.read())
        while self._unsent:
            self._wait(_HANDSHAKE, until - time.monotonic(), self._send, ())

    def _receive_some(self, into: memoryview) -> int:
        return self._receive_all(into)

    def _receive_all(self, into: memoryview) -> int:
        """Read the plain bytes that one fetch brings."""
        count = 0
        while count < len(into):
            try:
                read = self._session.read(len(into) - count, into[count:])
                count += cast(int, read)
            except ssl.SSLWantReadError:
                if count:
                    break
                self._fetch(len(into))
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                break
        return count

    def _fetch(self, wanted: int) -> int:
        """Read encrypted bytes for `wanted` plain ones.

        The last record may have arrived in part, and no more may follow it. So the kernel may
        wait for all bytes only up to one record before the end.
        """
        sure = min(_BATCH_BYTES, wanted - _RECORD_BYTES)
        if sure > 0:
            count = self._socket.recv_into(self._scratch[:sure], flags=socket.MSG_WAITALL)
        else:
            count = self._socket.recv_into(self._scratch)
        if count:
            self._incoming.write(self._scratch[:count])
        else:
            self._incoming.write_eof()
        return count

    def _send(self, buffers: Sequence[memoryview]) -> int:
        if not self._unsent:
            self._stands_for = self._encrypt(buffers)
            self._unsent = memoryview(self._outgoing.read())
        self._unsent = self._unsent[self._socket.send(self._unsent) :]
        return 0 if self._unsent else self._stands_for

    def _encrypt(self, buffers: Sequence[memoryview]) -> int:
        """Encrypt a batch; return its number of plain bytes."""
        count = 0
        for buffer in buffers:
            done = 0
            while done < len(buffer):
                if count >= _BATCH_BYTES:
                    return count
                written = self._session.write(buffer[done : done + _BATCH_BYTES])
                done, count = done + written, count + written
        return count

    def _failed(self, error: OSError, operation: str) -> PeerLostError | MembershipError:
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            return MembershipError(f"no connection with {self.peer}: {explain(error)}")
        return super()._failed(error, operation)
