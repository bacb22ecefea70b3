# SPDX-License-Identifier: Apache-2.0
"""One connection of a server: a thread that reads a request, has it handled, and answers."""

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
from fleetlight.ps.messages.base import failure_of, operation_of
from fleetlight.ps.transport.authentication import admit
from fleetlight.ps.transport.frames import Frame, Frames
from fleetlight.ps.transport.interface import Connection, Handler, Reply
from fleetlight.ps.transport.memory_budget import MemoryBudget
from fleetlight.ps.transport.protocol import BODY_LIMIT, HEADER_LIMIT, MAGIC, Prefix
from fleetlight.ps.transport.socket_options import prepare
from fleetlight.roles.secret import Secret
from fleetlight.wire.plain import Wire
from fleetlight.wire.tls import TlsWire

#: no wait of a socket is shorter: 0 would mean not to wait, which is another kind of socket
_SHORTEST_S = 0.001


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """What a server grants to those who connect."""

    connections: int = 1024
    #: how long a stranger may take for all that makes it known, from the handshake of TLS on
    first_s: float = 20.0
    #: no part of a greeting, or of a proof, is longer
    first_bytes: int = 1 << 16
    #: connections of strangers: those that have not been welcomed yet
    strangers: int = 128
    #: a stranger makes room for the next one after that time, so that none can keep others out
    stranger_s: float = 1.0
    #: how long a peer may be silent in the middle of a frame, or not take in its answer
    silence_s: float = 300.0
    body: int = BODY_LIMIT


class Session(threading.Thread):
    """The thread of one connection. What goes wrong in it ends it and hurts nobody else."""

    def __init__(
        self,
        accepted: socket.socket,
        caller: str,
        handler: Handler,
        *,
        tls: ssl.SSLContext | None,
        token: Secret | None,
        limits: ConnectionLimits,
        room: MemoryBudget,
        ended: Callable[[Session], None],
    ) -> None:
        super().__init__(name=f"fleet-{caller}", daemon=True)
        self.connection = Connection(caller, self.interrupt, lambda: self._wire.has_ended())
        self._caller = caller
        self._handler, self._tls, self._limits, self._ended = handler, tls, limits, ended
        self._wire = Wire(accepted, caller)
        self._accepted, self._token, self._room = accepted, token, room
        #: since when the connection has been there
        self.began = time.monotonic()
        #: the other side has shown that it belongs to the job, as far as it was asked to
        self.is_known = False
        self._is_interrupted = False

    def interrupt(self) -> None:
        """From another thread: end the connection."""
        self._is_interrupted = True
        self._wire.interrupt()

    def finish(self) -> None:
        """From another thread: take no further request; an answer under way still goes out."""
        self._is_interrupted = True
        self._wire.stop_reading()

    def run(self) -> None:
        """Serve until the peer hangs up."""
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
                self._tell(error)
            finally:
                # whoever ends the server waits until here
                self._ended(self)

    def _tell(self, error: PeerError | None) -> None:
        if self.is_known:
            self._handler.gone(self.connection, error)
        elif error is not None and not (self._is_interrupted and isinstance(error, PeerLostError)):
            logger.warning("closed a connection: %s", error)

    def _serve(self) -> None:
        prepare(self._accepted)
        until = time.monotonic() + self._limits.first_s
        if self._tls is not None:
            self._secure(self._tls, until)
        frames = Frames(self._wire, self._limits.silence_s, self._room)
        frame = self._greeting(frames, until)
        while frame is not None:
            self._answer(frames, frame)
            # its memory may serve the next one
            del frame
            frame = self._request(frames)

    def _greeting(self, frames: Frames, until: float) -> Frame | None:
        """The first request of a client that belongs to the job."""
        limit = self._limits.first_bytes
        most = Prefix(limit, limit)

        def heard() -> Frame | None:
            return frames.receive("a greeting", until=until, most=most)

        with self._refusing(frames):
            first = heard()
            greeting = None if first is None else admit(frames, first, self._token, heard)
        self.is_known = greeting is not None
        return greeting

    def _request(self, frames: Frames) -> Frame | None:
        with self._refusing(frames):
            return frames.receive("a request", most=Prefix(HEADER_LIMIT, self._limits.body))

    @contextlib.contextmanager
    def _refusing(self, frames: Frames) -> Iterator[None]:
        """Tell whoever makes no sense, or does not belong here, before the connection ends."""
        try:
            yield
        except (ProtocolError, MembershipError) as error:
            self._refuse(frames, error)
            raise

    def _answer(self, frames: Frames, frame: Frame) -> None:
        message, arrays = self._handled(frame)
        try:
            frames.send(frame.request, message, arrays, "a reply")
        except PlanError as error:
            # what does not fit into a frame is found out before any byte is sent
            frames.send(frame.request, failure_of(error), (), "a reply")

    def _handled(self, frame: Frame) -> Reply:
        try:
            return self._handler(self.connection, frame.message, frame.arrays)
        except FleetError as error:
            return failure_of(error), ()
        except Exception as error:
            operation = operation_of(frame.message)
            logger.exception("%s of %s failed", operation, self.connection.peer)
            return failure_of(error), ()

    def _secure(self, tls: ssl.SSLContext, until: float) -> None:
        """Put the connection inside TLS, once both sides have shown who they are."""
        self._accepted.settimeout(max(until - time.monotonic(), _SHORTEST_S))
        if self._accepted.recv(1, socket.MSG_PEEK) == MAGIC[:1]:
            error = MembershipError(
                f"{self._caller} came without TLS, and this server takes only clients with a "
                "certificate; give --ssl DIR (strategy.ssl) to all processes of the job"
            )
            self._refuse(Frames(self._wire, self._limits.first_s), error)
            raise error
        self._wire = wire = TlsWire(self._accepted, self._caller)
        try:
            wire.handshake(tls, until - time.monotonic())
        except MembershipError:
            # the client has been told why, and shall have time to read it
            wire.linger()
            raise

    def _refuse(self, frames: Frames, error: PeerError) -> None:
        """Say why, for the case that it is one of ours, and hang up."""
        with contextlib.suppress(PeerError):
            frames.send(0, failure_of(error), (), "a refusal")
            frames.wire.linger()
