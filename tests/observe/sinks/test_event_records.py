# SPDX-License-Identifier: Apache-2.0
"""Each kind of event has a name, a severity and attributes in OpenTelemetry."""

from __future__ import annotations

import pytest

from fleetlight.launch.exit_codes import RESUME_CODE, exit_code
from fleetlight.observe.sinks.otlp import (
    ON_REQUEST,
    Severity,
    attributes,
    body,
    event_name,
    severity,
)
from fleetlight.observe.telemetry.snapshot import Event

WORKER = {"fleetlight.role": "worker", "fleetlight.index": 1}
PROCESS = {**WORKER, "host.name": "10.0.0.2", "process.pid": 7}
CASES = [
    (Event(1.0, "worker 1", "start", "started, pid 7", "10.0.0.2", 7), Severity.INFO, PROCESS),
    (
        Event(1.0, "worker 1", "restart", "restart 2, pid 7", "10.0.0.2", 7, restart=2),
        Severity.WARN,
        {**PROCESS, "fleetlight.restart": 2},
    ),
    (
        Event(1.0, "worker 1", "exit", "exited with code 0", "10.0.0.2", 7, 0),
        Severity.INFO,
        {**PROCESS, "process.exit.code": 0},
    ),
    (
        Event(1.0, "worker 1", "exit", "exited with code 3", "10.0.0.2", 7, 3),
        Severity.ERROR,
        {**PROCESS, "process.exit.code": 3},
    ),
    (
        Event(1.0, "worker 1", "exit", "killed by SIGKILL", "10.0.0.2", 7, -9),
        Severity.ERROR,
        {**PROCESS, "fleetlight.signal": "SIGKILL"},
    ),
    (
        Event(1.0, "worker 1", "exit", "killed by SIGTERM", "10.0.0.2", 7, -15),
        Severity.WARN,
        {**PROCESS, "fleetlight.signal": "SIGTERM"},
    ),
    (
        Event(1.0, "worker 1", "exit", "killed by signal 99", "10.0.0.2", 7, -99),
        Severity.ERROR,
        {**PROCESS, "fleetlight.signal": "99"},
    ),
    *(
        (
            Event(1.0, "worker 1", kind, "some text", pid=7, step=40),
            Severity.INFO,
            {**PROCESS, "fleetlight.step": 40},
        )
        for kind in ("checkpoint", "resume", "publication", "join")
    ),
    (
        Event(1.0, "fleetrun", "end", "ended with code 0", "10.0.0.1", status=0),
        Severity.INFO,
        {"fleetlight.role": "fleetrun", "host.name": "10.0.0.1", "process.exit.code": 0},
    ),
    (
        Event(1.0, "fleetrun", "end", "ended with code 75", "10.0.0.1", status=75),
        Severity.WARN,
        {"fleetlight.role": "fleetrun", "host.name": "10.0.0.1", "process.exit.code": 75},
    ),
    (
        Event(1.0, "worker 1", "exit", "exited with code 3"),
        Severity.INFO,
        {**WORKER, "host.name": "10.0.0.2"},
    ),
]


@pytest.mark.parametrize(("event", "expected", "found"), CASES)
def test_an_event_as_a_record(
    event: Event, expected: Severity, found: dict[str, str | int]
) -> None:
    assert event_name(event) == f"fleetlight.{event.kind}"
    assert severity(event) is expected
    assert attributes(event, host="10.0.0.2") == found
    assert body(event) == f"{event.who}: {event.text}"


def test_a_job_that_has_saved_ends_on_request() -> None:
    assert {RESUME_CODE, exit_code(-15), exit_code(-2)} <= ON_REQUEST
