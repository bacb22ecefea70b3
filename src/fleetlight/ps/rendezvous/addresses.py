# SPDX-License-Identifier: Apache-2.0
"""`Addresses`: where the servers listen, as the connections of one worker know it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from fleetlight.errors import DeadlineError, PeerLostError
from fleetlight.ps.messages import ServerEntry
from fleetlight.ps.rendezvous.client import RendezvousClient
from fleetlight.ps.transport.dialing import NotReadyError
from fleetlight.roles.role import Endpoint

#: an answer of the rendezvous holds for this long, for all connections
_HOLDS_S = 0.5
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

    def __init__(self, rendezvous: RendezvousClient) -> None:
        self._rendezvous = rendezvous
        self._lock = threading.Lock()
        self._asked_at = 0.0
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
            if time.monotonic() - self._asked_at > _HOLDS_S:
                try:
                    self._ask(_ASK_S)
                except (DeadlineError, PeerLostError) as error:
                    if server not in self._known:
                        raise NotReadyError(str(error)) from None
                    # the rendezvous may be away itself; the last answer may still hold
                    self._asked_at = time.monotonic()
            return _endpoint(self._known[server])

    def _ask(self, within_s: float | None) -> None:
        located = self._rendezvous.locate(self._known.values(), within_s)
        self._known = {entry.server: entry for entry in located.servers}
        self._asked_at = time.monotonic()


def _endpoint(entry: ServerEntry) -> Endpoint:
    return entry.host, entry.port
