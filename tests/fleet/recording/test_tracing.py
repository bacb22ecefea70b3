# SPDX-License-Identifier: Apache-2.0
"""What a process records for `fleetlight trace`, and that training never pays for a failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.workers import run_processes

from fleetlight.fleet.job import Job
from fleetlight.fleet.recording import tracing
from fleetlight.fleet.recording.tracing import ProcessTracer
from fleetlight.observe.tracing.request import TracePart, TraceRequest, request, take_part
from fleetlight.observe.tracing.spans import spans
from fleetlight.roles.role import Kind, Role
from fleetlight.torch_compat.profiling import YieldingProfiler

WANTED = TraceRequest("ab", 2)


class TracedJob:
    """What a tracer sees of a job, and its steps."""

    def __init__(self, folder: Path, kind: Kind = Kind.WORKER) -> None:
        self.folder = folder
        self.role = Role(kind=kind, index=0)
        self.step_made: Callable[[], None] | None = None
        self.tracer = ProcessTracer(cast(Job, self), folder)

    def begin(self, wanted: TraceRequest = WANTED) -> None:
        """The command asks, and the tracer looks."""
        request(self.folder, wanted)
        self.tracer.look()

    def step(self) -> None:
        """What is recorded has an operator of torch and a span."""
        torch.ones(2).cos()
        if spans.is_on:
            spans.mark("a request")
        if self.step_made is not None:
            self.step_made()

    def part(self) -> TracePart | None:
        return take_part(self.folder, WANTED, f"{self.role.kind.value} 0")


def names_in(part: TracePart | None) -> set[str]:
    assert part is not None
    return {event["name"] for event in part.torch_events} | {span.name for span in part.spans}


@pytest.fixture
def job(tmp_path: Path) -> TracedJob:
    return TracedJob(tmp_path)


def beside_a_profiler_of_the_script(folder: str) -> tuple[bool, str, bool]:
    job = TracedJob(Path(folder))
    job.begin()
    with torch.profiler.profile() as script:
        for _ in range(3):
            job.step()
    part = job.part()
    script.export_chrome_trace(f"{folder}/script.json")
    events = json.loads(Path(folder, "script.json").read_text())["traceEvents"]
    assert part is not None
    assert not part.torch_events
    is_in_script = any(event["name"] == "aten::cos" for event in events)
    return "request" in names_in(part), part.note, is_in_script


def test_a_profiler_of_the_script_keeps_its_events(tmp_path: Path) -> None:
    [(has_spans, note, is_in_script)] = run_processes(
        beside_a_profiler_of_the_script, [(str(tmp_path),)]
    )
    assert has_spans
    assert is_in_script
    assert note == "no events of torch, since the script uses torch's profiler itself"


def test_steps_have_events_of_torch_and_spans(job: TracedJob) -> None:
    job.begin()
    for _ in range(3):
        job.step()
    part = job.part()
    assert {"aten::cos", "request"} <= names_in(part)
    assert part is not None
    assert not part.note
    assert job.step_made is None


@pytest.mark.parametrize("fails", ["start", "export"])
def test_a_profiler_that_fails_costs_only_its_events(
    job: TracedJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    def refuse(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    if fails == "start":
        monkeypatch.setattr(YieldingProfiler, "start", refuse)
    else:
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", refuse)
    job.begin()
    for _ in range(3):
        job.step()
    part = job.part()
    assert part is not None
    assert "No space left on device" in part.note
    assert "No space left on device" in caplog.text
    assert {span.name for span in part.spans} == {"request"}


def test_a_part_that_cannot_be_written_is_a_warning(
    job: TracedJob, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: Any) -> None:
        raise TypeError("not JSON")

    monkeypatch.setattr(tracing, "write_part", refuse)
    job.begin()
    for _ in range(3):
        job.step()
    assert "the trace of worker 0 is not written" in caplog.text
    assert "TypeError: not JSON" in caplog.text
