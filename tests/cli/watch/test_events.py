# SPDX-License-Identifier: Apache-2.0
"""`fleetlight events` prints what happened in a job, or sends it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.proto")

from tests.observe.sinks.collector import Collector

from fleetlight.cli.fleetlight import main
from fleetlight.cli.watch.events import _Export
from fleetlight.launch.processes.followers import event_export
from fleetlight.launch.processes.record import ProcessEntry, RecordFile


def entry(pid: int, status: int | None = None) -> ProcessEntry:
    return ProcessEntry(name="worker 0", pid=pid, start=1, status=status)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The log folder of a job that has ended."""
    record = RecordFile(tmp_path, "a1b2", "10.0.0.1", "train")
    record.update([entry(3)])
    record.update([entry(3, -9)])
    record.conclude(137)
    record.close()
    return tmp_path


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20")
    return monkeypatch


@pytest.mark.parametrize("flags", [[], ["--follow"]])
def test_the_events_of_a_job_that_has_ended(
    flags: list[str], log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["events", str(log), *flags]) == 0
    start, end, job = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  worker 0   start        .*pid 3", start)
    assert "exit         was killed by SIGKILL" in end
    assert "fleetrun   end          ended with code 137" in job


def test_lines_of_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", str(log), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["who"], one["kind"], one.get("status")) for one in lines] == [
        ("worker 0", "start", None),
        ("worker 0", "exit", -9),
        ("fleetrun", "end", 137),
    ]


def test_a_log_folder_is_sent(
    log: Path, endpoint: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Collector() as collector:
        endpoint.setenv(event_export.ENDPOINT, collector.url)
        assert main(["events", str(log), "--export"]) == 0
    assert capsys.readouterr().out == "sent 3 events\n"
    assert [one.data.event_name for one in collector.records] == [
        "fleetlight.start",
        "fleetlight.exit",
        "fleetlight.end",
    ]
    assert collector.records[0].resource["fleetlight.job.id"] == "a1b2"
    assert collector.by_name().keys() == {"train", "worker 0"}


def test_a_job_that_runs_has_no_span_yet(log: Path, endpoint: pytest.MonkeyPatch) -> None:
    RecordFile(log, "a1b2", "10.0.0.2", "train").update([entry(4)])
    with Collector() as collector:
        endpoint.setenv(event_export.ENDPOINT, collector.url)
        assert main(["events", str(log), "--export"]) == 0
    assert len(collector.records) == 4
    # the process that has ended
    assert [one.data.name for one in collector.spans] == ["worker 0"]


def test_a_collector_that_refuses_is_an_error(
    log: Path, endpoint: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Collector() as collector:
        collector.status = 404
        endpoint.setenv(event_export.ENDPOINT, collector.url)
        assert main(["events", str(log), "--export"]) == 1
    said = capsys.readouterr().err
    assert "3 events and 2 spans did not reach OpenTelemetry" in said
    assert "404" in said
    assert event_export.ENDPOINT in said


def test_a_running_job_warns_of_the_first_failure_only(
    log: Path, endpoint: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Collector() as collector:
        collector.status = 404
        endpoint.setenv(event_export.ENDPOINT, collector.url)
        export = _Export(log, 2, "fleetrun")
        export.run(lambda: export.has_warned)
        lacks = export.close(60.0, is_over=True)
    assert lacks.startswith("3 events and 2 spans did not reach OpenTelemetry: ")
    [line] = capsys.readouterr().err.splitlines()
    assert re.match(r"fleetrun: warning: OpenTelemetry takes no (events|spans): ", line)
    assert "The job continues, and its newest 2 " in line
    assert "404" in line


def test_one_line_says_what_to_install(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(event_export, "_PACKAGES", ("no_such_package.sdk",))
    assert main(["events", str(log), "--export"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "needs no_such_package.sdk: pip install 'fleetlight[opentelemetry]'" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["--export", "--json"], "--export prints no events"), ([], "has no folder 'metrics'")],
)
def test_what_is_wrong_is_named(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["events", str(tmp_path), *words]) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_nothing_of_it_is_imported_where_events_are_printed(log: Path) -> None:
    code = (
        "import sys; from fleetlight.cli.fleetlight import main; "
        f"main(['events', {str(log)!r}]); "
        "assert not [one for one in sys.modules if one.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
