# SPDX-License-Identifier: Apache-2.0
"""A client's connection to a server, which waits for the server and reconnects."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import ssl
import time
from collections.abc import Callable, Iterator, Sequence

from fleetlight.errors import DeadlineError, PeerError, PeerLostError, ProtocolError
from fleetlight.ps.message_base import error_of, operation_of
from fleetlight.ps.messages import Failure, Message, ShareMemory
from fleetlight.ps.transport.authentication import authenticate
from fleetlight.ps.transport.dialing import NotReadyError, dial
from fleetlight.ps.transport.frames import Frame, Frames
from fleetlight.ps.transport.interface import DEFAULT_RETRY, ReceivedReply, RetryPolicy
from fleetlight.ps.transport.memory_sharing import offer_memory
from fleetlight.ps.transport.protocol import Array
from fleetlight.roles.role import Endpoint, endpoint_text
from fleetlight.roles.secret import Secret

#: seconds between attempts to connect, limit of an attempt, seconds between reports
_TRY_EVERY_S = 0.1
_TRY_S = 5.0
_REPORT_EVERY_S = 5.0
#: how long a refusal may take: a server sends it just before it closes the connection
_REFUSAL_S = 1.0


@dataclasses.dataclass
class _Request:
    """A request without a reply."""

    number: int
    message: Message
    arrays: Sequence[Array]
    tries: int = 1

    @property
    def operation(self) -> str:
        """Its name in errors."""
        return operation_of(self.message)


class SocketChannel:
    """A channel over TCP, with or without TLS; `connect_all` or `connect` opens it."""

    def __init__(
        self,
        locate: Callable[[], Endpoint],
        name: str,
        *,
        deadline_s: float,
        tls: ssl.SSLContext | None = None,
        token: Secret | None = None,
        greeting: Callable[[], Message] | None = None,
        retry: RetryPolicy = DEFAULT_RETRY,
        on_sharing: Callable[[str], None] | None = None,
        check: Callable[[Message], None] = lambda welcome: None,
    ) -> None:
        """`locate` says before each attempt to connect where the server listens.

        It raises NotReadyError if that is not known. The server may be silent for `deadline_s`.
        `greeting` makes the first message of every connection, also after a reconnect; `welcome`
        is the latest reply to it, which `check` may refuse. With a `token` both sides prove it.
        With `on_sharing` a server on this host shares memory for large bodies; the callback gets
        the reason if it does not.
        """
        self.peer = name
        self.welcome: ReceivedReply | None = None
        self._name, self._locate = name, locate
        self._tls, self._greeting = tls, greeting
        self._token, self._check = token, check
        self._on_sharing = on_sharing
        #: True while large bodies may go through shared memory
        self._may_share = False
        self._deadline_s = deadline_s
        #: may change while the channel is open
        self.retry = retry
        self.is_embedded = False
        self._numbers = itertools.count(1)
        self._frames: Frames | None = None
        self._request: _Request | None = None
        self._closed = False
        #: how often a request was repeated on a new connection
        self.reconnects = 0

    @classmethod
    def connect(
        cls,
        endpoint: Endpoint,
        name: str,
        *,
        deadline_s: float,
        tls: ssl.SSLContext | None = None,
        token: Secret | None = None,
        greeting: Callable[[], Message] | None = None,
        retry: RetryPolicy = DEFAULT_RETRY,
        on_sharing: Callable[[str], None] | None = None,
        not_ready: Callable[[list[str]], None] | None = None,
    ) -> SocketChannel:
        """Open a channel to a server that may not listen yet."""
        channel = cls(
            lambda: endpoint,
            name,
            deadline_s=deadline_s,
            tls=tls,
            token=token,
            greeting=greeting,
            retry=retry,
            on_sharing=on_sharing,
        )
        connect_all([channel], deadline_s, not_ready)
        return channel

    def open(self, limit_s: float, welcome_s: float | None = None) -> None:
        """Try once to connect and greet.

        `welcome_s` bounds the greeting, instead of the deadline for silence.
        """
        self._drop()
        within_s = math.inf if welcome_s is None else welcome_s
        endpoint = self._locate()
        self.peer = f"{self._name} ({endpoint_text(endpoint)})"
        frames = Frames(dial(endpoint, self.peer, limit_s, self._tls), self._deadline_s)
        try:
            if self._greeting is not None:
                welcome = self._greet(frames, self._greeting(), time.monotonic() + within_s)
                self._check(welcome.message)
                self.welcome = welcome
            self._frames = frames
            self._may_share = self._on_sharing is not None and frames.wire.is_local()
            self.check_not_closed("connecting")
        except BaseException:
            frames.wire.close()
            raise

    @property
    def is_local(self) -> bool:
        """True while the connection is to a server on this host."""
        frames = self._frames
        return frames is not None and frames.wire.is_local()

    def bytes_moved(self) -> tuple[int, int]:
        """How many bytes the present connection has sent and received."""
        frames = self._frames
        return (0, 0) if frames is None else frames.wire.bytes_moved()

    def output(self, shape: tuple[int, ...], dtype: str) -> Array | None:
        """Memory for the next array of the next request; None: the caller allocates it."""
        frames = self._frames
        return None if frames is None else frames.output(shape, dtype)

    def send(self, message: Message, arrays: Sequence[Array] = ()) -> None:
        """Send a request; the previous one must have its reply."""
        assert self._request is None, f"{self.peer}: one request in flight per channel"
        self._request = request = _Request(next(self._numbers), message, arrays)
        try:
            self._transmit(request)
        except PeerLostError as lost:
            with self._broken_by_errors():
                self._reconnect_and_repeat(request, lost)
        except BaseException:
            self._break()
            raise

    def expect(self, deadline_s: float | None = None) -> None:
        """Wait for the start of the reply; `receive` handles a broken connection."""
        frames, request = self._frames, self._request
        assert request is not None, f"{self.peer}: nothing was sent"
        if frames is not None:
            limit_s = self._deadline_s if deadline_s is None else deadline_s
            with self._broken_by_errors():
                frames.wire.wait_readable(request.operation, limit_s)

    def has_reply(self, within_s: float) -> bool:
        """True when `receive` would not wait longer, even because the connection broke."""
        frames = self._frames
        return frames is None or frames.wire.is_readable(within_s)

    def receive(self, deadline_s: float | None = None) -> ReceivedReply:
        """Return the reply; a `Failure` is raised as the error that it names."""
        request = self._request
        assert request is not None, f"{self.peer}: nothing was sent"
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        try:
            frame = self._reply(request, limit_s)
        except PeerLostError as lost:
            frame = self._repeated(request, limit_s, lost)
        except BaseException:
            self._break()
            raise
        self._request = None
        return self._received(frame)

    def _repeated(self, request: _Request, limit_s: float, lost: PeerLostError) -> Frame:
        """Repeat a request on new connections until its reply arrives."""
        with self._broken_by_errors():
            while True:
                self._reconnect_and_repeat(request, lost)
                try:
                    return self._reply(request, limit_s)
                except PeerLostError as again:
                    lost = again

    def call(
        self, message: Message, arrays: Sequence[Array] = (), deadline_s: float | None = None
    ) -> ReceivedReply:
        """Send and receive."""
        self.send(message, arrays)
        return self.receive(deadline_s)

    def reopen(self, limit_s: float) -> bool:
        """Try once to reconnect; False while the server is away or if it will not return."""
        if self._closed or not self.retry.restarts:
            return False
        self._request = None
        try:
            self.open(limit_s, limit_s)
        except (NotReadyError, PeerLostError, DeadlineError):
            # the kernel accepts connections for a server that is busy or stopped
            return False
        return True

    def close(self) -> None:
        """Close the connection, from any thread; a second call does nothing."""
        self._closed = True
        if (frames := self._frames) is not None:
            # wakes a thread that waits on the connection
            frames.wire.interrupt()
        self._drop()

    def check_not_closed(self, operation: str) -> None:
        """Raise when the channel is closed, perhaps by another thread."""
        if self._closed:
            raise PeerLostError(f"{self.peer}: the connection was closed during {operation}")

    @contextlib.contextmanager
    def _broken_by_errors(self) -> Iterator[None]:
        """Close the connection after an error: a late reply could arrive on it."""
        try:
            yield
        except BaseException:
            self._break()
            raise

    def _break(self) -> None:
        self._request = None
        self._drop()

    def _drop(self) -> None:
        frames, self._frames = self._frames, None
        if frames is not None:
            frames.wire.close()

    def _greet(self, frames: Frames, greeting: Message, until: float) -> ReceivedReply:
        request = _Request(next(self._numbers), greeting, ())

        def reply() -> ReceivedReply:
            try:
                return self._received(self._next(frames, request, self._deadline_s, until))
            except DeadlineError as error:
                raise DeadlineError(
                    f"{error}; expected a parameter server there, but another program may listen"
                ) from None

        if self._token is None:
            frames.send(request.number, greeting, (), request.operation)
        else:
            authenticate(frames, request.number, greeting, self._token, lambda: reply().message)
        return reply()

    def _transmit(self, request: _Request) -> None:
        frames = self._frames
        if frames is None:
            raise PeerLostError(
                f"{self.peer}: the connection was closed before {request.operation}"
            )
        if self._may_share:
            self._share_memory(frames, request.arrays)
        try:
            frames.send(request.number, request.message, request.arrays, request.operation)
        except PeerLostError:
            self._raise_refusal(frames, request)
            raise

    def _share_memory(self, frames: Frames, arrays: Sequence[Array]) -> None:
        """Share memory for bodies of this size, or those of earlier replies."""
        slot_bytes = frames.wanted_slot(sum(array.nbytes for array in arrays))
        if not slot_bytes:
            return
        offer = _Request(next(self._numbers), ShareMemory("", b"", slot_bytes), ())
        why = offer_memory(
            frames,
            offer.number,
            slot_bytes,
            self._deadline_s,
            lambda: self._next(frames, offer, self._deadline_s).message,
        )
        self._may_share = not why
        assert self._on_sharing is not None
        self._on_sharing(why)

    def _raise_refusal(self, frames: Frames, request: _Request) -> None:
        """Raise the reason of a server that refuses a frame while the client still sends it."""
        try:
            frame = frames.receive(request.operation, start_s=_REFUSAL_S)
        except PeerError:
            return
        if frame is not None and isinstance(frame.message, Failure):
            raise error_of(frame.message, self.peer)

    def _reply(self, request: _Request, limit_s: float) -> Frame:
        frames = self._frames
        if frames is None:  # by another thread
            raise PeerLostError(f"{self.peer}: the connection was closed in {request.operation}")
        return self._next(frames, request, limit_s)

    def _next(
        self, frames: Frames, request: _Request, limit_s: float, until: float = math.inf
    ) -> Frame:
        frame = frames.receive(request.operation, start_s=limit_s, until=until)
        if frame is None:
            raise frames.wire.lost(request.operation, "it closed the connection")
        if frame.request == 0 and isinstance(frame.message, Failure):
            # the server could not read the request, so it does not know the number
            raise error_of(frame.message, self.peer)
        if frame.request != request.number:
            raise ProtocolError(
                f"{self.peer} answered request {frame.request}, expected {request.number}"
            )
        return frame

    def _received(self, frame: Frame) -> ReceivedReply:
        if isinstance(frame.message, Failure):
            raise error_of(frame.message, self.peer)
        return ReceivedReply(frame.message, frame.arrays)

    def _reconnect_and_repeat(self, request: _Request, lost: PeerLostError) -> None:
        """Reconnect and repeat the request under the same number, if the retry policy allows."""
        while True:
            if self._closed or not self.retry.may_repeat(request.message, request.tries):
                raise lost
            request.tries += 1
            try:
                connect_all([self], self.retry.away_s)
            except DeadlineError as error:
                raise PeerLostError(f"{lost}; {error}") from None
            self.reconnects += 1
            try:
                self._transmit(request)
            except PeerLostError as again:
                lost = again
            else:
                return


def connect_all(
    channels: Sequence[SocketChannel],
    deadline_s: float,
    not_ready: Callable[[list[str]], None] | None = None,
) -> None:
    """Open channels to servers that may not listen yet.

    Calls `not_ready` every few seconds with the missing servers.
    """
    end = time.monotonic() + deadline_s
    report_at = time.monotonic() + _TRY_EVERY_S
    missing = dict.fromkeys(channels, "")
    while True:
        for channel in list(missing):
            channel.check_not_closed("connecting")
            try:
                channel.open(max(_TRY_EVERY_S, min(_TRY_S, end - time.monotonic())))
                del missing[channel]
            except (NotReadyError, PeerLostError) as error:
                missing[channel] = str(error)
        if not missing:
            return
        now = time.monotonic()
        if now >= end:
            raise DeadlineError(_not_ready_text(missing, deadline_s))
        if not_ready is not None and now >= report_at:
            not_ready([channel.peer for channel in missing])
            report_at = now + _REPORT_EVERY_S
        time.sleep(_TRY_EVERY_S)


def _not_ready_text(missing: dict[SocketChannel, str], deadline_s: float) -> str:
    reasons = "; ".join(f"{channel.peer}: {why}" for channel, why in missing.items())
    return f"not ready within {deadline_s:g} s: {reasons}; check that they run, and read their logs"
