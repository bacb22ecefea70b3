# SPDX-License-Identifier: Apache-2.0
"""What a process records for `fleetlight trace`, and that training never pays for a failure."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from tests.workers import run_processes

from fleetlight.fleet.job import Job
from fleetlight.fleet.recording import tracing
from fleetlight.fleet.recording.tracing import ProcessTracer
from fleetlight.observe.tracing.request import (
    TracePart,
    TraceRequest,
    TraceStage,
    begun,
    request,
    take_part,
    withdraw,
)
from fleetlight.observe.tracing.spans import spans
from fleetlight.roles.role import Kind, Role
from fleetlight.torch_compat.profiling import YieldingProfiler, is_profiled

WANTED = TraceRequest("ab", 2, TraceStage.WORKERS_BEGIN)


@pytest.fixture(autouse=True)
def _no_spans() -> Iterator[None]:
    """A trace that a test leaves open ends with the test."""
    yield
    spans.stop()


def of(wanted: TraceRequest, stage: TraceStage) -> TraceRequest:
    return msgspec.structs.replace(wanted, stage=stage)


class TracedJob:
    """What a tracer sees of a job, and its steps."""

    def __init__(self, folder: Path, kind: Kind = Kind.WORKER) -> None:
        self.folder = folder
        self.role = Role(kind=kind, index=0, server_num=1)
        self.step_made: Callable[[], None] | None = None
        self.tracer = ProcessTracer(cast(Job, self), folder)

    def server_clocks(self) -> dict[str, int]:
        return {"server 0": time.time_ns() + 2_000_000_000}

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

    def has_begun(self) -> bool:
        """Whether the process has said that it records since the last call."""
        return take_part(self.folder, WANTED, begun(f"{self.role.kind.value} 0")) is not None

    def part(self, wanted: TraceRequest = WANTED) -> TracePart | None:
        return take_part(self.folder, wanted, f"{self.role.kind.value} 0")


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
    assert part.host
    lead = part.clocks["server 0"]
    assert abs(lead.ahead_us - 2e6) <= lead.error_us


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


@pytest.mark.parametrize("steps", [0, 1])
def test_a_withdrawn_trace_ends_at_the_next_step(job: TracedJob, steps: int) -> None:
    job.begin()
    for _ in range(steps):
        job.step()
    withdraw(job.folder, WANTED)
    job.tracer.look()
    job.step()
    assert job.step_made is None
    assert not is_profiled()
    assert not spans.is_on
    assert job.part() is None


def test_another_trace_replaces_the_first(job: TracedJob) -> None:
    job.begin()
    job.step()
    other = TraceRequest("cd", 1, TraceStage.WORKERS_BEGIN)
    job.begin(other)
    job.step()
    job.tracer.look()
    for _ in range(2):
        job.step()
    assert job.part() is None
    assert {"aten::cos", "request"} <= names_in(job.part(other))


def test_a_part_that_comes_late_does_not_stay(job: TracedJob) -> None:
    job.begin()
    job.step()
    withdraw(job.folder, WANTED)
    for _ in range(2):
        job.step()
    assert job.step_made is None
    assert not list(job.folder.glob("metrics/*"))


@pytest.mark.parametrize("is_withdrawn", [False, True])
def test_a_server_writes_what_is_wanted(tmp_path: Path, is_withdrawn: bool) -> None:
    job = TracedJob(tmp_path, Kind.SERVER)
    job.begin(of(WANTED, TraceStage.SERVERS_BEGIN))
    assert job.has_begun()
    job.begin(WANTED)
    job.step()
    assert job.part() is None
    if is_withdrawn:
        withdraw(tmp_path, WANTED)
        job.tracer.look()
    else:
        job.begin(of(WANTED, TraceStage.OVER))
    assert not spans.is_on
    assert (job.part() is None) == is_withdrawn


def test_a_server_says_again_that_it_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = TracedJob(tmp_path, Kind.SERVER)
    wanted = of(WANTED, TraceStage.SERVERS_BEGIN)

    def refuse(*given: Any) -> None:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(tracing, "write_part", refuse)
        job.begin(wanted)
    assert not job.has_begun()
    job.tracer.look()
    assert job.has_begun()
    job.tracer.look()
    assert not job.has_begun()


def test_a_worker_records_once_servers_do(job: TracedJob) -> None:
    job.begin(of(WANTED, TraceStage.SERVERS_BEGIN))
    assert job.step_made is None
    job.begin(WANTED)
    assert job.step_made is not None


def test_a_folder_out_of_reach_ends_nothing(
    job: TracedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(116, "Stale file handle")

    job.begin()
    with monkeypatch.context() as patched:
        patched.setattr(tracing, "requested", refuse)
        job.tracer.look()
    for _ in range(3):
        job.step()
    assert job.part() is not None
