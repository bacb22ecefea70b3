# SPDX-License-Identifier: Apache-2.0
"""What launchers of all machines say of processes: by their records, else by events. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fleetlight.dashboard.view.facts import (
    LogFolderFacts,
    ProcessFacts,
    ProcessState,
    how_ended,
)
from fleetlight.observe.telemetry.process_events import ProcessEvents
from fleetlight.observe.telemetry.snapshot import Event


def completed(facts: LogFolderFacts, events: ProcessEvents) -> Mapping[str, ProcessFacts]:
    """The processes: records decide, events say what no record does."""
    names = dict.fromkeys([*facts.processes, *events.names])
    return {name: _completed(name, facts, events) for name in names}


def _completed(name: str, facts: LogFolderFacts, events: ProcessEvents) -> ProcessFacts:
    found = facts.processes.get(name, ProcessFacts(name=name))
    start = events.start(name, found.host)
    if found.state is not ProcessState.UNKNOWN:
        is_same = start is not None and start.pid == found.pid
        return dataclasses.replace(found, started=start.at) if start and is_same else found
    if start is not None:
        found = _event_facts(found, start, events.status(name, found.host))
    if facts.is_over and found.state is not ProcessState.FAILED:
        return dataclasses.replace(found, state=ProcessState.ENDED)
    return found


def _event_facts(found: ProcessFacts, start: Event, status: int | None) -> ProcessFacts:
    state, detail = ProcessState.RUNNING, ""
    if status is not None:
        state = ProcessState.FAILED if status else ProcessState.ENDED
        detail = how_ended(status)
    return dataclasses.replace(
        found,
        host=found.host or start.host,
        pid=start.pid or 0,
        state=state,
        detail=detail,
        restarts=start.restart,
        started=start.at,
    )
