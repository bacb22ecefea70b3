# SPDX-License-Identifier: Apache-2.0
"""Protocols of both ends of a connection, and the channel within one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from fleetlight.errors import PeerError
from fleetlight.ps.messages import Message
from fleetlight.ps.transport.protocol import Array

#: what a handler returns: the reply and its arrays
Reply: TypeAlias = tuple[Message, Sequence[Array]]


@dataclasses.dataclass(slots=True)
class ReceivedReply:
    """A received reply. The caller may keep the arrays."""

    message: Message
    arrays: list[Array]


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """How a client treats a server that it cannot reach."""

    #: how long the server may be away; 0: not at all
    away_s: float = 5.0
    #: the server restarts after each failure and keeps what it has acknowledged
    restarts: bool = False

    def may_repeat(self, message: Message, tries: int) -> bool:
        """True when a request that lost its connection is repeated over a new one.

        Only repeatable requests: pulls, and pushes, whose number lets the server recognise a
        repetition. Once, unless the server restarts after failures.
        """
        return message.repeatable and self.away_s > 0 and (self.restarts or tries == 1)


DEFAULT_RETRY = RetryPolicy()


class Channel(Protocol):
    """A client's end of a connection, for one thread at a time.

    `send` and `receive` are separate, so that a client sends to all servers before it waits for
    the first. Between the two the arrays must not change: the channel may repeat the request.
    """

    #: `server 1 (127.0.0.1:4711)`
    peer: str
    #: the latest reply to a greeting
    welcome: ReceivedReply | None
    #: how the channel treats a server that it cannot reach
    retry: RetryPolicy
    #: True if the server is in this process: the reply is there once `send` returns
    is_embedded: bool
    #: how often a request was repeated on a new connection
    reconnects: int

    @property
    def is_local(self) -> bool:
        """True if the server is on this host."""

    def output(self, shape: tuple[int, ...], dtype: str) -> Array | None:
        """Memory for the next array of the next request, as `Connection.output` for replies.

        It stays as it is until the reply arrives; the previous request must have its reply.
        """

    def send(self, message: Message, arrays: Sequence[Array] = ()) -> None:
        """Send a request; the previous one must have its reply."""

    def expect(self, deadline_s: float | None = None) -> None:
        """Wait for the start of the reply."""

    def has_reply(self, within_s: float) -> bool:
        """True when the reply starts to arrive in this time."""

    def receive(self, deadline_s: float | None = None) -> ReceivedReply:
        """Return the reply; a `Failure` is raised as the error that it names."""

    def call(
        self, message: Message, arrays: Sequence[Array] = (), deadline_s: float | None = None
    ) -> ReceivedReply:
        """Send and receive."""

    def bytes_moved(self) -> tuple[int, int]:
        """How many bytes the connection has sent and received."""

    def reopen(self, limit_s: float) -> bool:
        """Try once to reconnect; False while the server is away or if it will not return."""

    def close(self) -> None:
        """Close the connection; a second call does nothing."""


class Connection:
    """A server's end of a connection, as the handler sees it."""

    def __init__(
        self,
        peer: str,
        hang_up: Callable[[], None] = lambda: None,
        has_ended: Callable[[], bool] = lambda: False,
        output: Callable[[tuple[int, ...], str], Array | None] = lambda shape, dtype: None,
    ) -> None:
        #: `127.0.0.1:40112`, until the handler replaces it
        self.peer = peer
        #: free for the handler
        self.note: Any = None
        self._hang_up = hang_up
        #: True when the peer closed the connection, even while a request is handled
        self.has_ended = has_ended
        #: Memory for the next array of the reply, of a shape and a dtype; None: the handler
        #: allocates it. Arrays there cross the connection without a copy if they are the first of
        #: the reply, in this order. They stay as they are until the next request.
        self.output = output

    def close(self) -> None:
        """Close the connection, from any thread."""
        self._hang_up()


class Handler(Protocol):
    """Handles the requests of a server, on the thread of each connection."""

    def __call__(self, connection: Connection, message: Message, arrays: Sequence[Array]) -> Reply:
        """Handle a request. An exception becomes a `Failure`; the connection stays open.

        The handler may keep the arrays. The arrays of the reply must not change until it is sent.
        """

    def gone(self, connection: Connection, error: PeerError | None) -> None:
        """The connection ended, properly if there is no error.

        Not called for clients whose first frame never reached the handler. The kernel also closes
        the connections of a killed process properly; only `Leave` is a goodbye.
        """


class MemoryChannel:
    """A channel to a handler in this process: no bytes, no threads, arrays by reference."""

    def __init__(self, handler: Handler, peer: str = "server 0 (in this process)") -> None:
        self.peer = peer
        self.welcome: ReceivedReply | None = None
        self.retry = RetryPolicy(0.0)
        self._handler = handler
        self._connection = Connection("worker 0 (in this process)")
        self.is_local = self.is_embedded = True
        self.reconnects = 0
        self._reply: Reply | None = None
        self._open = True

    def output(self, shape: tuple[int, ...], dtype: str) -> None:
        """None: arrays pass by reference."""

    def send(self, message: Message, arrays: Sequence[Array] = ()) -> None:
        """Handle the request at once, on this thread."""
        assert self._reply is None, "one request in flight per channel"
        self._reply = self._handler(self._connection, message, arrays)

    def expect(self, deadline_s: float | None = None) -> None:
        """Return at once: the reply is there."""

    def has_reply(self, within_s: float) -> bool:
        """True: the reply is there."""
        return True

    def receive(self, deadline_s: float | None = None) -> ReceivedReply:
        """Return the reply."""
        assert self._reply is not None, "nothing was sent"
        (message, arrays), self._reply = self._reply, None
        return ReceivedReply(message, list(arrays))

    def call(
        self, message: Message, arrays: Sequence[Array] = (), deadline_s: float | None = None
    ) -> ReceivedReply:
        """Send and receive."""
        self.send(message, arrays)
        return self.receive(deadline_s)

    def bytes_moved(self) -> tuple[int, int]:
        """No bytes move."""
        return 0, 0

    def reopen(self, limit_s: float) -> bool:
        """False: the server is in this process."""
        return False

    def close(self) -> None:
        """Close the channel; a second call does nothing."""
        if self._open:
            self._open = False
            self._handler.gone(self._connection, None)
