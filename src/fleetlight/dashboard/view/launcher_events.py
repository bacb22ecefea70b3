# SPDX-License-Identifier: Apache-2.0
"""`LauncherEvents`: when launchers started processes, from their events. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fleetlight.dashboard.view.facts import LogFolderFacts, ProcessFacts
from fleetlight.observe.figures.snapshot import Event

_STARTS = ("start", "restart")


class LauncherEvents:
    """The last start of each process."""

    def __init__(self) -> None:
        self._starts: dict[str, Event] = {}

    def add(self, event: Event) -> None:
        """Take in an event, in any order of times."""
        if event.kind in _STARTS:
            _keep_newer(self._starts, event)

    def completed(self, facts: LogFolderFacts) -> Mapping[str, ProcessFacts]:
        """The processes: events say when they were started."""
        return {name: self._of(one) for name, one in facts.processes.items()}

    def _of(self, found: ProcessFacts) -> ProcessFacts:
        start = self._starts.get(found.name)
        is_same = start is not None and start.pid == found.pid
        return dataclasses.replace(found, started=start.at) if start and is_same else found


def _keep_newer(known: dict[str, Event], event: Event) -> None:
    last = known.get(event.who)
    if last is None or event.at >= last.at:
        known[event.who] = event
