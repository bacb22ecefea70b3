# SPDX-License-Identifier: Apache-2.0
"""Traces of processes become one, on one time axis, with arrows between them."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.observe.tracing.clocks import ClockLead, leads_of, leads_over_first
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


# -- clocks of hosts are compared by requests to servers


#: nanoseconds until a request arrives, and until its reply does
WAYS = st.tuples(st.integers(0, 10_000_000), st.integers(0, 10_000_000))

#: between the two readings of a clock before a request
TICK_NS = 40


@given(st.integers(-10_000_000_000, 10_000_000_000), st.lists(WAYS, min_size=5, max_size=5))
def test_the_true_lead_is_within_the_error(lead_ns: int, ways: list[tuple[int, int]]) -> None:
    now = 1_800_000_000 * 10**9
    left: Iterator[tuple[int, int]] = iter(ways)

    def read() -> int:
        nonlocal now
        now += TICK_NS
        return now

    def ask() -> Mapping[str, int]:
        nonlocal now
        there, back = next(left)
        now += there
        shown = now + lead_ns
        now += back
        return {"server 0": shown}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(time, "time_ns", read)
        patched.setattr(time, "perf_counter_ns", read)
        found = leads_of(ask)["server 0"]
    assert abs(found.ahead_us - lead_ns / 1e3) <= found.error_us
    fastest_us = min((there + back + 2 * TICK_NS) / 2e3 for there, back in ways)
    resolution_us = 1e6 * time.get_clock_info("time").resolution
    assert found.error_us == pytest.approx(fastest_us + resolution_us)


def part(name: str, host: str, begin_us: float = 0.0, **clocks: tuple[float, float]) -> TracePart:
    leads = {key.replace("_", " "): ClockLead(*found) for key, found in clocks.items()}
    return TracePart(name, 1, [TraceSpan("push", "main", begin_us, 1.0)], host=host, clocks=leads)


def test_hosts_are_compared_over_the_servers_that_both_asked() -> None:
    parts = [
        part("worker 0", "a", server_0=(500.0, 1.0), server_1=(90.0, 40.0)),
        part("worker 1", "b", server_0=(200.0, 2.0), server_1=(0.0, 1.0)),
        part("server 0", "c"),
        part("server 1", "d"),
    ]
    assert leads_over_first(parts) == {
        "a": ClockLead(0.0, 0.0),
        "b": ClockLead(300.0, 3.0),
        "c": ClockLead(500.0, 1.0),
        # over worker 1, since its own request took longer
        "d": ClockLead(300.0, 4.0),
    }


def test_a_host_has_one_clock_whatever_a_request_says() -> None:
    parts = [part("worker 0", "a", server_0=(70.0, 99.0)), part("server 0", "a")]
    assert leads_over_first(parts) == {"a": ClockLead(0.0, 0.0)}


def test_a_host_without_servers_is_not_compared() -> None:
    assert leads_over_first([part("worker 0", "a"), part("worker 1", "b")]).keys() == {"a"}


def test_a_trace_of_two_hosts_has_one_time_axis() -> None:
    torch_event = {"ph": "X", "name": "aten::mm", "ts": 30.0, "dur": 1.0}
    worker = part("worker 0", "a", 1_000.0, server_0=(5_000.0, 2.0))
    other = part("worker 1", "b", 9_010.0, server_0=(-3_000.0, 2.0))
    other = TracePart("worker 1", 2, other.spans, [torch_event], 9_000.0, "", "b", other.clocks)
    events = merged([worker, other, part("server 0", "c", 6_005.0)])["traceEvents"]
    times = {(e["pid"], e["name"]): e["ts"] for e in events if e["ph"] == "X"}
    assert times == {(1, "push"): 0.0, (2, "push"): 10.0, (2, "aten::mm"): 30.0, (3, "push"): 5.0}


# -- requests for traces, in a folder that may not be readable


def test_the_last_request_is_read(tmp_path: Path) -> None:
    assert requested(tmp_path) is None
    wanted = TraceRequest("a", steps=3)
    request(tmp_path, wanted)
    assert requested(tmp_path) == wanted


def test_a_damaged_request_is_none_and_a_folder_out_of_reach_an_error(tmp_path: Path) -> None:
    file = tmp_path / "metrics" / "trace-request.json"
    file.parent.mkdir()
    file.write_text("{")
    assert requested(tmp_path) is None
    file.unlink()
    file.mkdir()
    with pytest.raises(OSError, match="directory"):
        requested(tmp_path)
