# SPDX-License-Identifier: Apache-2.0
"""Traces of processes become one, on one time axis, with arrows between them."""

from pathlib import Path

from fleetlight.observe.tracing.merged import merged
from fleetlight.observe.tracing.request import (
    TracePart,
    TraceRequest,
    request,
    requested,
    take_part,
    write_part,
)
from fleetlight.observe.tracing.spans import SpanRecorder, TraceSpan

PUSH = TraceSpan("push", "MainThread", 1_000_100.0, 50.0, begins="worker 0.1.0")
APPLIED = TraceSpan("push", "session", 1_000_120.0, 10.0, {"from": "worker 0"}, ends="worker 0.1.0")
TORCH = {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 5, "ts": 40.0, "dur": 3.0}


def parts() -> list[TracePart]:
    worker = TracePart("worker 0", 77, [PUSH], [TORCH, {"ph": "M", "name": "x"}], 1_000_000.0)
    return [worker, TracePart("server 0", 78, [APPLIED])]


def test_all_events_are_on_one_time_axis() -> None:
    events = merged(parts())["traceEvents"]
    times = {(e["pid"], e["name"]): e["ts"] for e in events if e["ph"] == "X"}
    assert times == {(1, "aten::mm"): 0.0, (1, "push"): 60.0, (2, "push"): 80.0}


def test_an_arrow_leads_from_a_request_to_its_server() -> None:
    events = merged(parts())["traceEvents"]
    arrows = {e["ph"]: (e["pid"], e["id"]) for e in events if e["ph"] in "sf"}
    assert arrows == {"s": (1, "worker 0.1.0"), "f": (2, "worker 0.1.0")}


def test_processes_and_threads_have_names() -> None:
    events = merged(parts())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert names == {"worker 0 (pid 77)", "server 0 (pid 78)", "MainThread", "session"}


def test_no_part_makes_an_empty_trace() -> None:
    assert merged([])["traceEvents"] == []


def test_spans_are_recorded_between_start_and_stop() -> None:
    spans = SpanRecorder()
    assert not spans.is_on
    spans.start()
    spans.add("pull", 1.0, 1.5, {"rows": 3})
    spans.mark("worker 1.2.0")
    pull, mark = spans.stop()
    assert (pull.name, pull.duration_us, pull.track) == ("pull", 500_000.0, "MainThread")
    assert mark.begins == "worker 1.2.0"
    assert spans.stop() == []


def test_a_part_is_taken_once(tmp_path: Path) -> None:
    assert requested(tmp_path) is None
    wanted = TraceRequest("ab", 3)
    request(tmp_path, wanted)
    assert requested(tmp_path) == wanted
    [worker, _] = parts()
    assert take_part(tmp_path, wanted, "worker 0") is None
    write_part(tmp_path, wanted, worker)
    assert take_part(tmp_path, wanted, "worker 0") == worker
    assert take_part(tmp_path, wanted, "worker 0") is None


def test_a_note_is_a_label_of_its_process() -> None:
    events = merged([TracePart("worker 0", 77, [PUSH], note="no events of torch")])["traceEvents"]
    labels = [(e["pid"], e["args"]["labels"]) for e in events if e["name"] == "process_labels"]
    assert labels == [(1, "no events of torch")]
