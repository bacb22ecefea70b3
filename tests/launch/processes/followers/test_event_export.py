# SPDX-License-Identifier: Apache-2.0
"""`fleetrun --sinks opentelemetry` sends the events of a real job, and never harms it."""

import re

import pytest

pytest.importorskip("opentelemetry.proto")

from tests.launch.workplace import Workplace, outcome
from tests.observe.sinks.collector import Collector

pytestmark = pytest.mark.multiprocess

#: worker 1 kills itself, and ends well after the restart
RESTARTED = """
    import os, signal
    if os.environ["FLEET_INDEX"] == "1" and os.environ["FLEET_RESTART"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_events_of_a_job_with_a_killed_process_arrive(place: Workplace) -> None:
    script = place.script(RESTARTED)
    flags = ("--nproc_per_node", "2", "--max_restarts", "1", "--no_preload")
    with Collector() as collector:
        sinks = f"opentelemetry:{collector.url}"
        # the variable of one signal would come first
        unused = {"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://127.0.0.1:1/v1/logs"}
        code, output = place.run(*flags, "--sinks", sinks, script, **unused)
    assert code == 0, output
    assert "OpenTelemetry" not in output
    of_worker = [
        (one.data.event_name, one.data.severity_text, one.attributes)
        for one in collector.records
        if one.attributes.get("fleetlight.index") == 1
    ]
    names = [(name, level) for name, level, _ in of_worker]
    assert names == [
        ("fleetlight.start", "INFO"),
        ("fleetlight.exit", "ERROR"),
        ("fleetlight.restart", "WARN"),
        ("fleetlight.exit", "INFO"),
    ]
    start, killed, restart, end = (found for _, _, found in of_worker)
    assert killed["fleetlight.signal"] == "SIGKILL"
    assert killed["process.pid"] == start["process.pid"] != restart["process.pid"]
    assert (restart["fleetlight.restart"], end["process.exit.code"]) == (1, 0)
    last = collector.records[-1]
    assert (last.data.event_name, last.attributes["process.exit.code"]) == ("fleetlight.end", 0)
    assert last.resource["fleetlight.job.id"] in place.log("endpoints.log")
    incarnations = [one for one in collector.spans if one.data.name == "worker 1"]
    assert len(incarnations) == 2
    assert {one.data.parent_span_id for one in incarnations} == {
        collector.by_name()["train"].data.span_id
    }


def test_a_job_without_a_collector_ends_with_one_warning(place: Workplace) -> None:
    script = place.script("")
    with Collector() as collector:
        gone = collector.url
    code, output = place.run("--sinks", "opentelemetry", script, OTEL_EXPORTER_OTLP_ENDPOINT=gone)
    assert code == 0, output
    assert "done: " in outcome(output)
    [line] = [line for line in output.splitlines() if "OpenTelemetry" in line]
    assert line.startswith("fleetrun: warning: 3 events and 2 spans did not reach OpenTelemetry: ")
    assert "[Errno 111] Connection refused" in line
    assert line.endswith("to send all: fleetlight events log --export")


def test_without_the_packages_no_process_starts(place: Workplace) -> None:
    script = place.script("open('started', 'w').close()")
    # a package that hides the one of OpenTelemetry
    (place.path / "opentelemetry").mkdir()
    (place.path / "opentelemetry" / "__init__.py").touch()
    code, output = place.run("--sinks", "opentelemetry", script)
    assert code == 2
    assert re.fullmatch(
        r"fleetrun: error: the export of events needs opentelemetry\.sdk, .*: "
        r"pip install 'fleetlight\[opentelemetry\]'\n",
        output,
    )
    assert not (place.path / "started").exists()


def test_a_mistake_in_the_name_starts_no_process(place: Workplace) -> None:
    script = place.script("open('started', 'w').close()")
    code, output = place.run("--sinks", "opentelemetri", script)
    assert code == 2
    assert "got 'opentelemetri'; did you mean 'opentelemetry'?" in output
    assert not (place.path / "started").exists()
