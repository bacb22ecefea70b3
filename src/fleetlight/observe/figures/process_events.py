# SPDX-License-Identifier: Apache-2.0
"""`ProcessEvents`: the last start and the last exit of each process. Pure.

Records of launchers stay on their machines, but their events travel to node 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from fleetlight.observe.figures.snapshot import Event

_STARTS = ("start", "restart")


class ProcessEvents:
    """What launchers of all machines report of processes."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._starts: dict[str, Event] = {}
        self._exits: dict[str, Event] = {}
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

    def start(self, name: str) -> Event | None:
        """The last start of a process; None if none is known."""
        return self._starts.get(name)

    def status(self, name: str) -> int | None:
        """How a process ended after its last start; None while it runs."""
        start, exit_ = self._starts.get(name), self._exits.get(name)
        return exit_.status if start and exit_ and exit_.at >= start.at else None


def _keep_newer(known: dict[str, Event], event: Event) -> None:
    last = known.get(event.who)
    if last is None or event.at >= last.at:
        known[event.who] = event
