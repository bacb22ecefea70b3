# SPDX-License-Identifier: Apache-2.0
"""Accepts the connections of a server, bounds their number and closes them at the end."""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Iterator

from fleetlight.errors import AddressError, PeerLostError
from fleetlight.observe.log import logger
from fleetlight.ps.message_base import failure_of
from fleetlight.ps.messages import Message
from fleetlight.ps.transport.interface import Handler
from fleetlight.ps.transport.memory.memory_budget import MemoryBudget, free_memory
from fleetlight.ps.transport.protocol import MessageCodec
from fleetlight.ps.transport.session import ConnectionLimits, Session
from fleetlight.ps.transport.socket_options import family
from fleetlight.roles.role import Endpoint, endpoint_text
from fleetlight.roles.secret import Secret
from fleetlight.wire.descriptors import ACCEPT_PAUSE_S, CANNOT_ACCEPT, OUT_OF_DESCRIPTORS
from fleetlight.wire.forking import keep_from_children, keep_port_from_children

_BACKLOG = 1024


class Listener:
    """Listens at one address, with a thread for each connection."""

    def __init__(
        self,
        endpoint: Endpoint,
        handler: Handler,
        *,
        tls: ssl.SSLContext | None = None,
        token: Secret | None = None,
        limits: ConnectionLimits | None = None,
        name: str = "server",
        held: socket.socket | None = None,
    ) -> None:
        """Clients must prove the `token`, if any.

        `held` is a socket from `bind`, for a port that must be known earlier.
        """
        self._handler, self._tls, self._token = handler, tls, token
        self._limits, self._budget = limits or ConnectionLimits(), MemoryBudget(free_memory)
        self._socket = bind(endpoint) if held is None else held
        with _address_errors(self._socket, endpoint):
            self._socket.listen(_BACKLOG)
        host, port = self._socket.getsockname()[:2]
        #: the address in use, with the actual port when port 0 was requested
        self.address: Endpoint = (host, port)
        keep_port_from_children(port)
        self._sessions: set[Session] = set()
        self._lock = threading.Lock()
        self._stopping = False
        self._wake, self._waked = socket.socketpair()
        for end in (self._wake, self._waked):
            keep_from_children(end)
        self._thread = threading.Thread(target=self._accept, name=f"fleet-{name}", daemon=True)
        self._thread.start()

    def stop(self, within_s: float = 5.0) -> None:
        """Close all connections and wait for the threads; a second call does nothing."""
        end = time.monotonic() + within_s
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            sessions = list(self._sessions)
        self._wake.close()
        self._thread.join(max(0.0, end - time.monotonic()))
        # the reply to the last goodbye may still be in flight
        for session in sessions:
            session.finish()
        _join(sessions, end - within_s / 2)
        for session in sessions:
            session.interrupt()
        _join(sessions, end)
        for session in sessions:
            if session.is_alive() and session is not threading.current_thread():
                logger.warning("%s is still busy after %g s", session.connection.peer, within_s)

    def _accept(self) -> None:
        # this thread closes them: a selector would forget a socket that another thread closes
        with self._socket, self._waked, selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._waked, selectors.EVENT_READ)
            while not self._stopping:
                selector.select()
                try:
                    accepted, caller = self._socket.accept()
                except OSError as error:
                    self._complain(error)
                else:
                    self._start_session(accepted, caller)

    def _complain(self, error: OSError) -> None:
        """Log a lack of resources; any other error means that the client has gone again."""
        if error.errno in OUT_OF_DESCRIPTORS:
            logger.warning(CANNOT_ACCEPT, error.strerror)
            # the client still waits in the backlog, so the selector would return at once
            time.sleep(ACCEPT_PAUSE_S)

    def _start_session(self, accepted: socket.socket, caller: tuple[str, int]) -> None:
        session = Session(
            accepted,
            endpoint_text((caller[0], caller[1])),
            self._handler,
            tls=self._tls,
            token=self._token,
            limits=self._limits,
            budget=self._budget,
            ended=self._forget,
        )
        with self._lock:
            refused = "the server is ending" if self._stopping else self._crowded(session)
            if refused is None:
                self._sessions.add(session)
        if refused is not None:
            self._refuse(session, accepted, refused)
            return
        try:
            session.start()
        except RuntimeError:  # no further thread
            self._forget(session)
            self._refuse(session, accepted, "the system cannot start another thread")

    def _crowded(self, session: Session) -> str | None:
        """Why the limits forbid another connection; None if they allow it."""
        if len(self._sessions) >= self._limits.connections:
            return f"there are {len(self._sessions)} connections already"
        unauthenticated = [other for other in self._sessions if not other.is_known]
        if len(unauthenticated) < self._limits.unauthenticated:
            return None
        longest = min(unauthenticated, key=lambda other: other.began)
        if session.began - longest.began < self._limits.unauthenticated_s:
            return f"{len(unauthenticated)} other clients have not authenticated yet"
        longest.interrupt()
        return None

    def _refuse(self, session: Session, accepted: socket.socket, why: str) -> None:
        if not self._stopping:
            logger.warning("%s was refused: %s", session.connection.peer, why)
        with contextlib.suppress(OSError):
            accepted.setblocking(False)
            if self._tls is None:
                # the client retries, and reports this if it fails again
                accepted.send(_refusal(why))
                # closing a socket with unread bytes discards what it has sent
                accepted.recv(1 << 16)
        accepted.close()

    def _forget(self, session: Session) -> None:
        with self._lock:
            self._sessions.discard(session)


def _refusal(why: str) -> bytes:
    """A frame with the reason of the refusal."""
    codec: MessageCodec[Message] = MessageCodec(Message)
    return b"".join(codec.encode(0, failure_of(PeerLostError(f"refused: {why}"))))


def _join(sessions: list[Session], end: float) -> None:
    """Wait for the sessions, but not past `end`."""
    for session in sessions:
        # a handler may stop its own server
        if session is not threading.current_thread():
            session.join(max(0.0, end - time.monotonic()))


def bind(endpoint: Endpoint) -> socket.socket:
    """Bind a socket to an address, to listen later; port 0 chooses a free port."""
    held = socket.socket(family(endpoint[0]), socket.SOCK_STREAM)
    with _address_errors(held, endpoint):
        # the launcher reserves the port with a socket that is bound and does not listen
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(endpoint)
        held.setblocking(False)
    return held


@contextlib.contextmanager
def _address_errors(held: socket.socket, endpoint: Endpoint) -> Iterator[None]:
    """Turn an OSError into an AddressError with advice."""
    try:
        yield
    except OSError as error:
        held.close()
        raise AddressError(
            f"cannot listen at {endpoint_text(endpoint)}: {error.strerror}; the address must be "
            "one of this machine, and the port free"
        ) from None
