# SPDX-License-Identifier: Apache-2.0
"""`RendezvousClient`: what members ask the rendezvous; `Announcer`: what servers tell it."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from fleetlight.errors import MembershipError, PeerError, PeerLostError
from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.transport.interface import Channel, RetryPolicy
from fleetlight.roles.role import Endpoint

#: seconds between the announcements of a server
ANNOUNCE_EVERY_S = 1.0
#: how long an announcement may take
_REPLY_S = 5.0
#: how much longer a reply may take than the wait for it
_GRACE_S = 2.0
#: between two attempts to ask
_MIN_PAUSE_S = 0.1

_Reply = TypeVar("_Reply", bound=m.Message)

#: opens a connection to the rendezvous; the number bounds the attempt in seconds
Connect = Callable[[m.Attend, float], Channel]


class RendezvousClient:
    """Opens a connection for each question: members ask seldom."""

    def __init__(self, connect: Connect, attend: m.Attend, deadline_s: float) -> None:
        """`deadline_s` is how long the rendezvous may wait for other members."""
        self._connect, self._attend, self._deadline_s = connect, attend, deadline_s
        self.process = attend.process

    def enrol(self) -> m.Enrolled:
        """Arrive, and wait for all members of the same kind."""
        return self._ask(m.Enrol(), m.Enrolled, self._deadline_s)

    def locate(
        self, known: Iterable[m.ServerEntry] = (), within_s: float | None = None
    ) -> m.Located:
        """Where the servers listen; without `within_s`, wait until all have announced it."""
        message = m.Locate(list(known), waits=within_s is None)
        limit_s = self._deadline_s if within_s is None else within_s
        return self._ask(message, m.Located, limit_s)

    def depart(self, index: int, error: str = "") -> None:
        """Say goodbye; nothing happens if the rendezvous is gone."""
        with contextlib.suppress(PeerError):
            self._ask(m.Depart(index, error), m.Done, _REPLY_S)

    def channel(self, within_s: float) -> Channel:
        """A connection for several questions, which is not opened again when it breaks."""
        channel = self._connect(self._attend, within_s)
        channel.retry = RetryPolicy(0.0)
        return channel

    def _ask(self, message: m.Message, kind: type[_Reply], within_s: float) -> _Reply:
        """Ask, and again if the rendezvous is restarted meanwhile."""
        end = time.monotonic() + within_s
        while True:
            left_s = max(_MIN_PAUSE_S, end - time.monotonic())
            try:
                with self._connected(left_s) as channel:
                    # the rendezvous itself needs time to name the missing members
                    reply = channel.call(message, deadline_s=left_s + _GRACE_S).message
            except PeerLostError:
                if time.monotonic() >= end:
                    raise
                time.sleep(_MIN_PAUSE_S)
                continue
            assert isinstance(reply, kind), reply
            return reply

    @contextlib.contextmanager
    def _connected(self, within_s: float) -> Iterator[Channel]:
        channel = self.channel(within_s)
        try:
            yield channel
        finally:
            channel.close()


class Announcer:
    """Says where a server listens, again and again, on a thread of its own."""

    def __init__(
        self,
        rendezvous: RendezvousClient,
        server: int,
        endpoint: Endpoint,
        refused: Callable[[PeerError], None],
        buckets: range,
    ) -> None:
        """`refused` gets the error when another process has replaced this one.

        `buckets`: those of the ids whose rows the server stores.
        """
        self._rendezvous, self._server, self._endpoint = rendezvous, server, endpoint
        self._refused = refused
        self._buckets = [(buckets.start, buckets.stop)]
        self._incarnation = 0
        self._channel: Channel | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-announcer", daemon=True)

    def start(self, within_s: float) -> None:
        """Announce the server for the first time, and continue in the background."""
        self._channel = self._rendezvous.channel(within_s)
        self._announce()
        self._thread.start()

    def stop(self, error: str = "") -> None:
        """Say goodbye, after a failure with the error; a second call does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(2 * _REPLY_S)
        # at the end of a job, the rendezvous may have gone first
        with contextlib.suppress(PeerError):
            channel = self._channel or self._rendezvous.channel(ANNOUNCE_EVERY_S)
            channel.call(m.Depart(self._server, error), deadline_s=_REPLY_S)
            channel.close()

    def _run(self) -> None:
        is_away = False
        while not self._stop.wait(ANNOUNCE_EVERY_S):
            try:
                self._announce()
                is_away = False
            except MembershipError as error:
                self._refused(error)
                return
            except PeerError as error:
                if not is_away:
                    logger.warning("the rendezvous is away, and may return: %s", error)
                is_away = True

    def _announce(self) -> None:
        if self._channel is None:
            self._channel = self._rendezvous.channel(ANNOUNCE_EVERY_S)
        host, port = self._endpoint
        message = m.Announce(self._server, self._incarnation, host, port, self._buckets)
        try:
            reply = self._channel.call(message).message
        except PeerError:
            # the next announcement connects again
            self._channel.close()
            self._channel = None
            raise
        assert isinstance(reply, m.Announced), reply
        if reply.incarnation != self._incarnation and self._incarnation:
            logger.info("this server is incarnation %d from now on", reply.incarnation)
        self._incarnation = reply.incarnation


def random_name() -> str:
    """A name that no other process has."""
    return secrets.token_hex(16)
