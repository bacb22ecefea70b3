# SPDX-License-Identifier: Apache-2.0
"""What client and server see of a connection, and the connection that stays in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from fleetlight.errors import PeerError
from fleetlight.ps.messages import Message
from fleetlight.ps.transport.protocol import Array

#: what a handler returns: the answer and its arrays
Reply: TypeAlias = tuple[Message, Sequence[Array]]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back. The arrays may be kept: nobody else writes to them."""

    message: Message
    arrays: list[Array]


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """What is done about a server that is away."""

    #: how long it may be away; 0: not at all
    away_s: float = 5.0
    #: it will be started again as often as it dies, and knows what it has acknowledged
    comes_back: bool = False

    def may_repeat(self, message: Message, tries: int) -> bool:
        """Whether a request that lost its connection goes out again over a new one.

        Once, if the server will not come back, and only what does no harm when it was carried out
        the first time: pulls, and pushes, which carry a number by which the server knows those that
        it has applied.
        """
        return message.repeatable and self.away_s > 0 and (self.comes_back or tries == 1)


DEFAULT_RETRY = RetryPolicy()


class Channel(Protocol):
    """A client's end of a connection. One thread at a time uses it.

    `send` and `receive` are apart, so that a client can send to all servers before it waits for the
    first. Pause the two the arrays that were given must not change: the request may be sent
    again.
    """

    #: `server 1 (127.0.0.1:4711)`
    peer: str
    #: the latest answer to what was said first on a connection
    welcome: Answer | None
    #: what is done about a server that is away
    patience: RetryPolicy

    def send(self, message: Message, arrays: Sequence[Array] = ()) -> None:
        """Send a request; the one before must have been answered."""

    def expect(self, deadline_s: float | None = None) -> None:
        """Wait until the answer begins to come."""

    def answered(self, within_s: float) -> bool:
        """Whether the answer begins to come in this time; the next request needs the answer."""

    def receive(self, deadline_s: float | None = None) -> Answer:
        """The answer to what was sent; a `Failure` is raised as the error it names."""

    def call(
        self, message: Message, arrays: Sequence[Array] = (), deadline_s: float | None = None
    ) -> Answer:
        """Both."""

    def reopen(self, limit_s: float) -> bool:
        """Try once to be connected again; False while the server is away, or if it stays away."""

    def close(self) -> None:
        """Hang up; twice is fine."""


class Connection:
    """A server's end of a connection, as the handler sees it."""

    def __init__(
        self,
        peer: str,
        hang_up: Callable[[], None] = lambda: None,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        #: `127.0.0.1:40112`, until the handler knows better
        self.peer = peer
        #: whatever the handler wants to remember of it
        self.note: Any = None
        self._hang_up = hang_up
        #: whether the peer has hung up, which a request under way keeps from being noticed
        self.has_ended = has_ended

    def close(self) -> None:
        """End the connection, from any thread."""
        self._hang_up()


class Handler(Protocol):
    """What a server does with requests; called by the thread of each connection."""

    def __call__(self, connection: Connection, message: Message, arrays: Sequence[Array]) -> Reply:
        """Answer a request. What it raises becomes a `Failure`, and the connection goes on.

        The arrays may be kept. The arrays of the reply are read until it is sent: nobody may
        change them meanwhile.
        """

    def gone(self, connection: Connection, error: PeerError | None) -> None:
        """The connection has ended, properly if there is no error.

        Not called for strangers, whose first frame never reached the handler. The kernel says a
        proper goodbye for a process that was killed, too: only `Leave` is one.
        """


class MemoryChannel:
    """A channel to a handler in this process: no bytes, no threads, arrays by reference."""

    def __init__(self, handler: Handler, peer: str = "server 0 (in this process)") -> None:
        self.peer = peer
        self.welcome: Answer | None = None
        self.patience = RetryPolicy(0.0)
        self._handler = handler
        self._connection = Connection("worker 0 (in this process)")
        self._reply: Reply | None = None
        self._open = True

    def send(self, message: Message, arrays: Sequence[Array] = ()) -> None:
        """Has the request carried out at once, by this thread."""
        assert self._reply is None, "one request in flight per channel"
        self._reply = self._handler(self._connection, message, arrays)

    def expect(self, deadline_s: float | None = None) -> None:
        """It is there."""

    def answered(self, within_s: float) -> bool:
        """It is."""
        return True

    def receive(self, deadline_s: float | None = None) -> Answer:
        """The answer to what was sent."""
        assert self._reply is not None, "nothing was sent"
        (message, arrays), self._reply = self._reply, None
        return Answer(message, list(arrays))

    def call(
        self, message: Message, arrays: Sequence[Array] = (), deadline_s: float | None = None
    ) -> Answer:
        """Both."""
        self.send(message, arrays)
        return self.receive(deadline_s)

    def reopen(self, limit_s: float) -> bool:
        """Nobody goes away alone."""
        return False

    def close(self) -> None:
        """Hang up; twice is fine."""
        if self._open:
            self._open = False
            self._handler.gone(self._connection, None)
