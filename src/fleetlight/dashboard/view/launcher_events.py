# SPDX-License-Identifier: Apache-2.0
"""`LauncherEvents`: what launchers of all machines say of processes by events. Pure.

Their records stay on their machines, but events travel with the figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fleetlight.dashboard.view.facts import (
    LogFolderFacts,
    ProcessFacts,
    ProcessState,
    how_ended,
)
from fleetlight.observe.figures.snapshot import Event

_STARTS = ("start", "restart")


class LauncherEvents:
    """The last start and the last exit of each process."""

    def __init__(self) -> None:
        self._starts: dict[str, Event] = {}
        self._exits: dict[str, Event] = {}

    def add(self, event: Event) -> None:
        """Take in an event, in any order of times."""
        if event.kind in _STARTS:
            _keep_newer(self._starts, event)
        elif event.kind == "exit" and event.status is not None:
            _keep_newer(self._exits, event)

    def completed(self, facts: LogFolderFacts) -> Mapping[str, ProcessFacts]:
        """The processes: records decide, events say what no record does."""
        names = dict.fromkeys([*facts.processes, *self._starts])
        return {name: self._of(name, facts) for name in names}

    def _of(self, name: str, facts: LogFolderFacts) -> ProcessFacts:
        found = facts.processes.get(name, ProcessFacts(name=name))
        start = self._starts.get(name)
        if found.state is not ProcessState.UNKNOWN:
            is_same = start is not None and start.pid == found.pid
            return dataclasses.replace(found, started=start.at) if start and is_same else found
        if start is not None:
            found = self._of_events(found, start)
        if facts.is_over and found.state is not ProcessState.FAILED:
            return dataclasses.replace(found, state=ProcessState.ENDED)
        return found

    def _of_events(self, found: ProcessFacts, start: Event) -> ProcessFacts:
        state, detail, last = ProcessState.RUNNING, "", self._exits.get(found.name)
        if last is not None and last.status is not None and last.at >= start.at:
            state = ProcessState.FAILED if last.status else ProcessState.ENDED
            detail = how_ended(last.status)
        return dataclasses.replace(
            found,
            host=found.host or start.host,
            pid=start.pid or 0,
            state=state,
            detail=detail,
            restarts=start.restart,
            started=start.at,
        )


def _keep_newer(known: dict[str, Event], event: Event) -> None:
    last = known.get(event.who)
    if last is None or event.at >= last.at:
        known[event.who] = event
