# SPDX-License-Identifier: Apache-2.0
"""One trace of all processes, in the JSON format of Chrome's traces, which Perfetto opens. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fleetlight.observe.tracing.clocks import leads_over_first
from fleetlight.observe.tracing.request import TracePart

Event = dict[str, Any]
#: threads of spans are numbered from here, apart from those of torch
_FIRST_THREAD = 1_000_000_000


def merged(parts: Sequence[TracePart]) -> dict[str, Any]:
    """The trace; its times begin with the first span, by the clock of the first part."""
    leads = leads_over_first(parts)
    ahead = [leads[one.host].ahead_us if one.host in leads else 0.0 for one in parts]
    begins = [begin - by for part, by in zip(parts, ahead, strict=True) for begin in _begins(part)]
    first = min(begins, default=0.0)
    events: list[Event] = []
    for number, part in enumerate(parts, 1):
        base = first + ahead[number - 1]
        events += [
            _named("process_name", number, 0, f"{part.name} (pid {part.pid})"),
            {
                "ph": "M",
                "pid": number,
                "name": "process_sort_index",
                "args": {"sort_index": number},
            },
            *_note_events(part, number),
            *_span_events(part, number, base),
            *_torch_events(part, number, base),
        ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _begins(part: TracePart) -> Iterator[float]:
    """The times by the clock of this part."""
    for span in part.spans:
        yield span.begin_us
    for event in part.torch_events:
        if event.get("ph") == "X":
            yield part.torch_base_us + float(event["ts"])


def _named(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}


def _note_events(part: TracePart, number: int) -> Iterator[Event]:
    if part.note:
        yield {"ph": "M", "pid": number, "name": "process_labels", "args": {"labels": part.note}}


def _span_events(part: TracePart, number: int, base: float) -> Iterator[Event]:
    tracks = {
        name: _FIRST_THREAD + n for n, name in enumerate(sorted({s.track for s in part.spans}))
    }
    for name, thread in tracks.items():
        yield _named("thread_name", number, thread, name)
    for span in part.spans:
        place = {"pid": number, "tid": tracks[span.track], "ts": span.begin_us - base}
        yield {
            **place,
            "ph": "X",
            "name": span.name,
            "cat": "fleetlight",
            "dur": span.duration_us,
            "args": span.arguments,
        }
        flow = {**place, "name": "request", "cat": "fleetlight"}
        if span.begins:
            yield {**flow, "ph": "s", "id": span.begins}
        if span.ends:
            yield {**flow, "ph": "f", "bp": "e", "id": span.ends}


def _torch_events(part: TracePart, number: int, base: float) -> Iterator[Event]:
    for event in part.torch_events:
        if event.get("ph") in ("X", "i", "s", "f", "t") and "ts" in event:
            yield {**event, "pid": number, "ts": part.torch_base_us + float(event["ts"]) - base}
        elif event.get("ph") == "M" and event.get("name") == "thread_name":
            yield {**event, "pid": number}
