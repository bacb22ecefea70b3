# SPDX-License-Identifier: Apache-2.0
"""What an event of a job is in OpenTelemetry: its name, severity, body and attributes. Pure."""

from __future__ import annotations

import enum
import signal

from fleetlight.observe.telemetry.snapshot import Event

_PREFIX = "fleetlight."
#: exits that a user or an engine asks for: SIGINT and SIGTERM, with the codes of shells, and 75,
#: the exit code of a job that has saved and can resume
ON_REQUEST = frozenset({-signal.SIGINT, -signal.SIGTERM, 130, 143, 75})


class Severity(enum.IntEnum):
    """The severities that events have, by their numbers in OpenTelemetry."""

    INFO = 9
    WARN = 13
    ERROR = 17


def event_name(event: Event) -> str:
    """Such as `fleetlight.exit`."""
    return f"{_PREFIX}{event.kind}"


def severity(event: Event) -> Severity:
    """ERROR for a process or a job that fails; WARN for a restart and an exit on request."""
    if event.status:
        return Severity.WARN if event.status in ON_REQUEST else Severity.ERROR
    return Severity.WARN if event.kind == "restart" else Severity.INFO


def body(event: Event) -> str:
    """The sentence."""
    return f"{event.who}: {event.text}"


def attributes(event: Event, host: str = "") -> dict[str, str | int]:
    """What the event says, each as its own value; `host` is for events that name none."""
    role, _, index = event.who.partition(" ")
    killed = event.status is not None and event.status < 0
    found: dict[str, str | int | None] = {
        "fleetlight.role": role,
        "fleetlight.index": int(index) if index.isdecimal() else None,
        "host.name": event.host or host or None,
        "process.pid": event.pid,
        "process.exit.code": None if killed else event.status,
        "fleetlight.signal": _signal_name(-event.status) if killed and event.status else None,
        "fleetlight.restart": event.restart or None,
        "fleetlight.step": event.step,
    }
    return {name: value for name, value in found.items() if value is not None}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
