# SPDX-License-Identifier: Apache-2.0
"""One connection of a server: a thread that reads requests, handles them and replies."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

from fleetlight.errors import (
    FleetError,
    MembershipError,
    PeerError,
    PeerLostError,
    PlanError,
    ProtocolError,
)
from fleetlight.observe.log import logger
from fleetlight.observe.tracing.spans import spans
from fleetlight.ps.message_base import failure_of, operation_of
from fleetlight.ps.messages import Done, ShareMemory
from fleetlight.ps.transport.authentication import admit
from fleetlight.ps.transport.frames import Frame, Frames
from fleetlight.ps.transport.interface import Connection, Handler, Reply
from fleetlight.ps.transport.memory.memory_budget import MemoryBudget
from fleetlight.ps.transport.memory_sharing import accept_memory
from fleetlight.ps.transport.protocol import BODY_LIMIT, HEADER_LIMIT, MAGIC, Array, Prefix
from fleetlight.ps.transport.socket_options import prepare
from fleetlight.roles.secret import Secret
from fleetlight.wire.plain import Wire
from fleetlight.wire.tls import TlsWire

#: shortest timeout of a socket: 0 would make it non-blocking
_MIN_TIMEOUT_S = 0.001


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a server on its clients."""

    connections: int = 1024
    #: how long an unknown client may take from the TLS handshake to the end of its greeting
    first_s: float = 20.0
    #: maximum size of a part of a greeting or proof
    first_bytes: int = 1 << 16
    #: maximum number of connections without a completed greeting
    unauthenticated: int = 128
    #: after that time a newer client may replace an unknown one
    unauthenticated_s: float = 1.0
    #: how long a peer may be silent within a frame, or not read its reply
    silence_s: float = 300.0
    body: int = BODY_LIMIT


class Session(threading.Thread):
    """The thread of one connection. An error ends this connection and no other."""

    def __init__(
        self,
        accepted: socket.socket,
        caller: str,
        handler: Handler,
        *,
        tls: ssl.SSLContext | None,
        token: Secret | None,
        limits: ConnectionLimits,
        budget: MemoryBudget,
        ended: Callable[[Session], None],
    ) -> None:
        super().__init__(name=f"fleet-{caller}", daemon=True)
        self.connection = Connection(
            caller, self.interrupt, lambda: self._wire.has_ended(), self._output
        )
        self._caller = caller
        self._handler, self._tls, self._limits, self._ended = handler, tls, limits, ended
        self._wire = Wire(accepted, caller)
        self._frames: Frames | None = None
        self._accepted, self._token, self._budget = accepted, token, budget
        #: when the connection was accepted
        self.began = time.monotonic()
        #: True once the client has authenticated, as far as the server requires it
        self.is_known = False
        self._is_interrupted = False
        self._most = Prefix(HEADER_LIMIT, limits.body)

    def interrupt(self) -> None:
        """Close the connection, from another thread."""
        self._is_interrupted = True
        self._wire.interrupt()

    def finish(self) -> None:
        """Accept no further request, from another thread; a pending reply is still sent."""
        self._is_interrupted = True
        self._wire.stop_reading()

    def run(self) -> None:
        """Serve until the peer closes the connection."""
        error: PeerError | None = None
        try:
            self._serve()
        except PeerError as found:
            error = found
        except OSError as found:
            error = PeerLostError(f"lost {self._caller}: {found.strerror or found}")
        finally:
            self._wire.close()
            try:
                self._report_end(error)
            finally:
                # `Listener.stop` waits for this
                self._ended(self)

    def _report_end(self, error: PeerError | None) -> None:
        if self.is_known:
            self._handler.gone(self.connection, error)
        elif error is not None and not (self._is_interrupted and isinstance(error, PeerLostError)):
            logger.warning("closed a connection: %s", error)

    def _serve(self) -> None:
        prepare(self._accepted)
        until = time.monotonic() + self._limits.first_s
        if self._tls is not None:
            self._secure(self._tls, until)
        self._frames = frames = Frames(self._wire, self._limits.silence_s, self._budget)
        frame = self._greeting(frames, until)
        while frame is not None:
            self._reply(frames, frame)
            # its buffer may serve the next frame
            del frame
            frame = self._request(frames)

    def _greeting(self, frames: Frames, until: float) -> Frame | None:
        """Receive the first request of an authenticated client."""
        limit = self._limits.first_bytes
        most = Prefix(limit, limit)

        def next_frame() -> Frame | None:
            return frames.receive("a greeting", until=until, most=most)

        with self._refusing(frames):
            first = next_frame()
            greeting = None if first is None else admit(frames, first, self._token, next_frame)
        self.is_known = greeting is not None
        return greeting

    def _request(self, frames: Frames) -> Frame | None:
        try:
            return frames.receive("a request", most=self._most)
        except (ProtocolError, MembershipError) as error:
            self._refuse(frames, error)
            raise

    @contextlib.contextmanager
    def _refusing(self, frames: Frames) -> Iterator[None]:
        """Send the error to a client that is malformed or not a member, then close."""
        try:
            yield
        except (ProtocolError, MembershipError) as error:
            self._refuse(frames, error)
            raise

    def _reply(self, frames: Frames, frame: Frame) -> None:
        if isinstance(frame.message, ShareMemory):
            self._share_memory(frames, frame.request, frame.message)
            return
        message, arrays = self._handled(frame)
        try:
            frames.send(frame.request, message, arrays, "a reply")
        except PlanError as error:
            # the size of a frame is checked before any byte is sent
            frames.send(frame.request, failure_of(error), (), "a reply")

    def _share_memory(self, frames: Frames, request: int, offer: ShareMemory) -> None:
        try:
            accept_memory(frames, offer)
        except PeerError as error:
            frames.send(request, failure_of(error), (), "a reply")
        else:
            frames.send(request, Done(), (), "a reply")

    def _output(self, shape: tuple[int, ...], dtype: str) -> Array | None:
        """Memory for the next array of the reply."""
        return None if self._frames is None else self._frames.output(shape, dtype)

    def _handled(self, frame: Frame) -> Reply:
        try:
            if spans.is_on:
                return self._traced(frame)
            return self._handler(self.connection, frame.message, frame.arrays)
        except FleetError as error:
            return failure_of(error), ()
        except Exception as error:
            operation = operation_of(frame.message)
            logger.exception("%s of %s failed", operation, self.connection.peer)
            return failure_of(error), ()

    def _traced(self, frame: Frame) -> Reply:
        began, message = time.perf_counter(), frame.message
        try:
            return self._handler(self.connection, message, frame.arrays)
        finally:
            peer, sequence = str(self.connection.note), getattr(message, "sequence", 0)
            name, ends = type(message).__name__.lower(), f"{peer}.{sequence}" if sequence else ""
            spans.add(name, began, time.perf_counter(), {"from": peer}, ends=ends)

    def _secure(self, tls: ssl.SSLContext, until: float) -> None:
        """Run the TLS handshake, with certificates of both sides."""
        self._accepted.settimeout(max(until - time.monotonic(), _MIN_TIMEOUT_S))
        if self._accepted.recv(1, socket.MSG_PEEK) == MAGIC[:1]:
            error = MembershipError(
                f"{self._caller} connected without TLS, but this server accepts only clients "
                "with a certificate; give --ssl DIR (strategy.ssl) to all processes of the job"
            )
            self._refuse(Frames(self._wire, self._limits.first_s), error)
            raise error
        self._wire = wire = TlsWire(self._accepted, self._caller)
        try:
            wire.handshake(tls, until - time.monotonic())
        except MembershipError:
            # gives the client time to read the reason
            wire.linger()
            raise

    def _refuse(self, frames: Frames, error: PeerError) -> None:
        """Send the reason, in case the client speaks this protocol, and close."""
        with contextlib.suppress(PeerError):
            frames.send(0, failure_of(error), (), "a refusal")
            frames.wire.linger()
