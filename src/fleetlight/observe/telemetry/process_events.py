# SPDX-License-Identifier: Apache-2.0
"""`ProcessEvents`: the last start and the last exit of each process. Pure.

Records of launchers stay on their machines, but their events travel to node 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleetlight.observe.telemetry.snapshot import Event

_STARTS = ("start", "restart")


class ProcessEvents:
    """What launchers of all machines report of processes."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        #: by process and host, since clocks of hosts differ
        self._starts: dict[str, dict[str, Event]] = {}
        self._exits: dict[str, dict[str, Event]] = {}
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        """Take in an event, in any order of times."""
        if event.kind in _STARTS:
            _keep_newer(self._starts, event)
        elif event.kind == "exit" and event.status is not None:
            _keep_newer(self._exits, event)

    @property
    def names(self) -> list[str]:
        """The processes that were started."""
        return list(self._starts)

    def start(self, name: str, host: str = "") -> Event | None:
        """The last start of a process, on this host if one is given; None if none is known."""
        return _newest(self._starts.get(name, {}), host)

    def status(self, name: str, host: str = "") -> int | None:
        """How a process ended after its last start; None while it runs."""
        start = self.start(name, host)
        if start is None:
            return None
        exit_ = _newest(self._exits.get(name, {}), start.host)
        return exit_.status if exit_ is not None and exit_.at >= start.at else None


def _newest(by_host: dict[str, Event], host: str) -> Event | None:
    """The newest event; with a host only of those from there, or from nowhere in particular."""
    found = [event for where, event in by_host.items() if not host or where in (host, "")]
    return max(found, key=lambda event: event.at, default=None)


def _keep_newer(known: dict[str, dict[str, Event]], event: Event) -> None:
    of_process = known.setdefault(event.who, {})
    last = of_process.get(event.host)
    if last is None or event.at >= last.at:
        of_process[event.host] = event
