# SPDX-License-Identifier: Apache-2.0
"""Events arrive at a collector of OpenTelemetry, in the spans of their processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from tests.observe.sinks.collector import Collector
from tests.workers import reserved_port

from fleetlight.observe.sinks.otlp import (
    EVENTS,
    DeliveryOutcome,
    EventExporter,
    ExportedJob,
    _Failures,
)
from fleetlight.observe.telemetry.snapshot import Event
from fleetlight.version import VERSION

JOB = ExportedJob("a1b2", "train")
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
STORY = [
    Event(100.0, "worker 0", "start", "started, pid 5", "10.0.0.1", 5),
    Event(100.5, "worker 1", "start", "started, pid 6", "10.0.0.2", 6),
    Event(110.0, "worker 0", "checkpoint", "saved ckpt at step 40", pid=5, step=40),
    Event(120.0, "worker 1", "exit", "killed by SIGKILL", "10.0.0.2", 6, -9),
    Event(121.0, "worker 1", "restart", "restart 1, pid 7", "10.0.0.2", 7, restart=1),
    # recorded late
    Event(121.5, "worker 1", "checkpoint", "saved ckpt at step 50", pid=6, step=50),
    Event(130.0, "worker 0", "exit", "exited with code 0", "10.0.0.1", 5, 0),
    Event(131.0, "fleetrun", "end", "ended with code 1", "10.0.0.1", status=1),
]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20")
    for name in (ENDPOINT, "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


def exported(
    collector: Collector, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int]:
    monkeypatch.setenv(ENDPOINT, collector.url)
    exporter = EventExporter(JOB, pytest.fail)
    exporter.add(events)
    exporter.end_trace()
    return exporter.close(60.0)


def test_each_event_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        assert exported(collector, STORY, monkeypatch) == (0, 0)
    assert [one.data.body.string_value for one in collector.records] == [
        f"{event.who}: {event.text}" for event in STORY
    ]
    killed = collector.records[3]
    assert killed.data.event_name == "fleetlight.exit"
    assert (killed.data.severity_number, killed.data.severity_text) == (17, "ERROR")
    assert killed.data.time_unix_nano == 120_000_000_000
    assert killed.attributes == {
        "fleetlight.role": "worker",
        "fleetlight.index": 1,
        "host.name": "10.0.0.2",
        "process.pid": 6,
        "fleetlight.signal": "SIGKILL",
    }
    saved = collector.records[2]
    assert (saved.attributes["fleetlight.step"], saved.attributes["host.name"]) == (40, "10.0.0.1")
    expected = {
        "service.name": "fleetlight",
        "service.version": VERSION,
        "fleetlight.job.id": "a1b2",
        "fleetlight.job.name": "train",
    }
    assert expected.items() <= killed.resource.items()


def test_each_incarnation_of_a_process_is_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        exported(collector, STORY, monkeypatch)
    spans = {
        (one.data.name, one.attributes.get("process.pid")): one.data for one in collector.spans
    }
    job = spans["train", None]
    killed, again = spans["worker 1", 6], spans["worker 1", 7]
    assert len(spans) == 4
    assert {one.trace_id for one in spans.values()} == {job.trace_id}
    assert {one.parent_span_id for one in spans.values()} == {job.span_id, b""}
    times = [
        (one.start_time_unix_nano / 1e9, one.end_time_unix_nano / 1e9)
        for one in (job, spans["worker 0", 5], killed, again)
    ]
    # the last one has recorded no exit
    assert times == [(100.0, 131.0), (100.0, 130.0), (100.5, 120.0), (121.0, 131.0)]
    assert (killed.status.code, killed.status.message) == (
        Status.STATUS_CODE_ERROR,
        "killed by SIGKILL",
    )
    assert job.status.code == Status.STATUS_CODE_ERROR
    assert again.status.code == Status.STATUS_CODE_UNSET
    of_records = [one.data.span_id for one in collector.records]
    alive = spans["worker 0", 5].span_id
    assert of_records == [
        *(alive, killed.span_id, alive, killed.span_id),
        *(again.span_id, killed.span_id, alive, job.span_id),
    ]


def test_a_restart_ends_an_incarnation_without_an_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        exported(collector, [STORY[1], STORY[4]], monkeypatch)
    ends = sorted(one.data.end_time_unix_nano / 1e9 for one in collector.spans)
    assert ends == [121.0, 121.0, 121.0]


def test_an_exit_without_a_start_ends_no_other_span(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        exported(collector, [STORY[0], STORY[3], *STORY[6:]], monkeypatch)
    spans = {one.data.name: one.data for one in collector.spans}
    assert spans.keys() == {"train", "worker 0"}
    assert spans["train"].end_time_unix_nano == 131e9
    assert len(collector.records) == 4


def test_variables_of_the_sdk_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "clicks")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=ads")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with Collector() as collector:
        exported(collector, STORY, monkeypatch)
    assert len(collector.records) == len(STORY)
    assert collector.spans == []
    found = collector.records[0].resource
    assert (found["service.name"], found["team"]) == ("clicks", "ads")


def test_a_collector_that_refuses_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[tuple[str, str]] = []
    with Collector() as collector:
        collector.status = 401
        monkeypatch.setenv(ENDPOINT, collector.url)
        exporter = EventExporter(JOB, lambda *said: warnings.append(said), most=5)
        exporter.add(STORY)
        exporter.end_trace()
        lacks = exporter.close(60.0)
    assert lacks == (len(STORY), 4)
    [(_, reason)] = warnings
    assert "401" in reason
    assert collector.records == []


def test_a_collector_without_traces_takes_events(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[tuple[str, str]] = []
    with Collector() as collector:
        collector.lacks_path = "/v1/traces"
        monkeypatch.setenv(ENDPOINT, collector.url)
        exporter = EventExporter(JOB, lambda *said: warnings.append(said))
        exporter.add(STORY)
        exporter.end_trace()
        lacks = exporter.close(60.0)
    assert lacks == (0, 4)
    [(what, reason)] = warnings
    assert what == "spans"
    assert "404" in reason
    assert exporter.failure == reason
    assert len(collector.records) == len(STORY)


def test_a_refusal_after_a_lost_connection_is_a_refusal() -> None:
    said = iter(["[Errno 111] Connection refused", "Failed to export, code: 400"])

    def export(batch: Sequence[int]) -> bool:
        logging.getLogger(OTLPLogExporter.__module__).error(next(said))
        return False

    failures = _Failures(lambda what, why: None)
    send = failures.guarded(EVENTS, export, True)
    assert [send([1]), send([1])] == [DeliveryOutcome.LOST, DeliveryOutcome.REFUSED]
    assert failures.reason == "Failed to export, code: 400"


def test_a_batch_of_an_sdk_that_gave_up_is_lost() -> None:
    def export(batch: Sequence[int]) -> bool:
        said = "Failed to export logs batch due to timeout, max retries or shutdown."
        logging.getLogger(OTLPLogExporter.__module__).error(said)
        return False

    failures = _Failures(lambda what, why: None)
    assert failures.guarded(EVENTS, export, True)([1]) is DeliveryOutcome.LOST
    assert failures.reason == "timeout, max retries or shutdown"


def test_the_reason_is_known_while_the_sdk_tries_again() -> None:
    known = []

    def export(batch: Sequence[int]) -> bool:
        logging.getLogger(OTLPLogExporter.__module__).warning("[Errno 111] Connection refused")
        known.append(failures.reason)
        return True

    failures = _Failures(lambda what, why: None)
    assert failures.guarded(EVENTS, export, True)([1]) is DeliveryOutcome.ARRIVED
    assert [*known, failures.reason] == ["[Errno 111] Connection refused", ""]


@pytest.mark.slow
def test_a_collector_that_is_down_is_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[tuple[str, str]] = []
    # the SDK names the cause only where it has time to try again
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "6")
    # a socket that does not listen refuses connections
    holder, port = reserved_port()
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{port}")
    with holder:
        exporter = EventExporter(JOB, lambda *said: warnings.append(said))
        exporter.add(STORY)
        assert exporter.close(60.0) == (len(STORY), 2)
    [(_, reason)] = warnings
    assert exporter.failure == reason == "[Errno 111] Connection refused"
