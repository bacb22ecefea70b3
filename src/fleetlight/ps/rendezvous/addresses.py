# SPDX-License-Identifier: Apache-2.0
"""`Addresses`: where the servers listen, as the connections of one worker know it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from fleetlight.errors import DeadlineError, MembershipError, PeerLostError
from fleetlight.ps.messages import ServerEntry
from fleetlight.ps.rendezvous.client import RendezvousClient
from fleetlight.ps.transport.dialing import NotReadyError
from fleetlight.roles.role import Endpoint

#: an answer of the rendezvous holds for this long, for all connections of a worker; longer in a
#: job of many workers, which would all ask at once
_HOLDS_S, _WORKERS_A_SECOND = 0.5, 500
#: how long an attempt to reconnect may wait for the answer
_ASK_S = 2.0


class Addresses(Protocol):
    """Where the servers of a job listen."""

    def of(self, server: int) -> Endpoint:
        """Where a server listens; NotReadyError if no process has said it."""


class FixedAddresses:
    """The addresses that variables give."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = endpoints

    def of(self, server: int) -> Endpoint:
        """Where a server listens."""
        return self._endpoints[server]


class AnnouncedAddresses:
    """The addresses that servers announce; a server that was restarted may have another one."""

    def __init__(
        self,
        rendezvous: RendezvousClient,
        stored_by: Callable[[int], range],
        worker_num: int = 1,
    ) -> None:
        """`stored_by`: the buckets of the ids whose rows this worker expects on a server."""
        self._rendezvous, self._stored_by = rendezvous, stored_by
        self._spread_s = worker_num / _WORKERS_A_SECOND
        self._lock = threading.Lock()
        self._holds_until = 0.0
        #: by server: its newest process
        self._known: dict[int, ServerEntry] = {}

    def wait_for_all(self) -> tuple[Endpoint, ...]:
        """Wait until all servers have announced themselves; returns their endpoints."""
        with self._lock:
            self._ask(None)
            return tuple(_endpoint(self._known[server]) for server in sorted(self._known))

    def of(self, server: int) -> Endpoint:
        """Where a server listens now; asks the rendezvous for each attempt to connect."""
        with self._lock:
            if time.monotonic() >= self._holds_until:
                try:
                    self._ask(_ASK_S)
                except (DeadlineError, PeerLostError) as error:
                    # the rendezvous may be away itself; the last answer may still hold
                    self._hold()
                    if server not in self._known:
                        raise NotReadyError(str(error)) from None
            known = self._known.get(server)
            if known is None:
                raise NotReadyError(f"server {server} has not announced where it listens")
            return _endpoint(known)

    def _ask(self, within_s: float | None) -> None:
        located = self._rendezvous.locate(self._known.values(), within_s)
        for entry in located.servers:
            self._check_buckets(entry)
        self._known |= {entry.server: entry for entry in located.servers}
        self._hold()

    def _check_buckets(self, entry: ServerEntry) -> None:
        """Refuse a server that stores other rows than this worker would ask it for."""
        expected = self._stored_by(entry.server)
        if entry.buckets != [(expected.start, expected.stop)]:
            raise MembershipError(
                f"server {entry.server} (incarnation {entry.incarnation}) stores the buckets "
                f"{entry.buckets}, but this worker expects {expected.start} to "
                f"{expected.stop - 1}; use one version of Fleetlight everywhere"
            )

    def _hold(self) -> None:
        self._holds_until = time.monotonic() + _HOLDS_S + random.random() * self._spread_s


def _endpoint(entry: ServerEntry) -> Endpoint:
    return entry.host, entry.port
