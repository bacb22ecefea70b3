# SPDX-License-Identifier: Apache-2.0
"""Events arrive at a collector of OpenTelemetry, in the spans of their processes."""

import logging
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from tests.observe.sinks.collector import Collector
from tests.workers import reserved_port

from fleetlight.launch.exit_codes import RESUME_CODE, exit_code
from fleetlight.observe.sinks import otlp
from fleetlight.observe.telemetry.snapshot import Event
from fleetlight.version import VERSION

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


JOB = otlp.ExportedJob("a1b2", "train")
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
    exporter = otlp.EventExporter(JOB, pytest.fail)
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
        exporter = otlp.EventExporter(JOB, lambda *said: warnings.append(said), most=5)
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
        exporter = otlp.EventExporter(JOB, lambda *said: warnings.append(said))
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

    failures = otlp._Failures(lambda what, why: None)
    send = failures.guarded(otlp.EVENTS, export, True)
    assert [send([1]), send([1])] == [otlp.DeliveryOutcome.LOST, otlp.DeliveryOutcome.REFUSED]
    assert failures.reason == "Failed to export, code: 400"


def test_a_batch_of_an_sdk_that_gave_up_is_lost() -> None:
    def export(batch: Sequence[int]) -> bool:
        said = "Failed to export logs batch due to timeout, max retries or shutdown."
        logging.getLogger(OTLPLogExporter.__module__).error(said)
        return False

    failures = otlp._Failures(lambda what, why: None)
    assert failures.guarded(otlp.EVENTS, export, True)([1]) is otlp.DeliveryOutcome.LOST
    assert failures.reason == "timeout, max retries or shutdown"


def test_the_reason_is_known_while_the_sdk_tries_again() -> None:
    known = []

    def export(batch: Sequence[int]) -> bool:
        logging.getLogger(OTLPLogExporter.__module__).warning("[Errno 111] Connection refused")
        known.append(failures.reason)
        return True

    failures = otlp._Failures(lambda what, why: None)
    assert failures.guarded(otlp.EVENTS, export, True)([1]) is otlp.DeliveryOutcome.ARRIVED
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
        exporter = otlp.EventExporter(JOB, lambda *said: warnings.append(said))
        exporter.add(STORY)
        assert exporter.close(60.0) == (len(STORY), 2)
    [(_, reason)] = warnings
    assert exporter.failure == reason == "[Errno 111] Connection refused"


WORKER = {"fleetlight.role": "worker", "fleetlight.index": 1}
PROCESS = {**WORKER, "host.name": "10.0.0.2", "process.pid": 7}
CASES = [
    (Event(1.0, "worker 1", "start", "started, pid 7", "10.0.0.2", 7), otlp.Severity.INFO, PROCESS),
    (
        Event(1.0, "worker 1", "restart", "restart 2, pid 7", "10.0.0.2", 7, restart=2),
        otlp.Severity.WARN,
        {**PROCESS, "fleetlight.restart": 2},
    ),
    (
        Event(1.0, "worker 1", "exit", "exited with code 0", "10.0.0.2", 7, 0),
        otlp.Severity.INFO,
        {**PROCESS, "process.exit.code": 0},
    ),
    (
        Event(1.0, "worker 1", "exit", "exited with code 3", "10.0.0.2", 7, 3),
        otlp.Severity.ERROR,
        {**PROCESS, "process.exit.code": 3},
    ),
    (
        Event(1.0, "worker 1", "exit", "killed by SIGKILL", "10.0.0.2", 7, -9),
        otlp.Severity.ERROR,
        {**PROCESS, "fleetlight.signal": "SIGKILL"},
    ),
    (
        Event(1.0, "worker 1", "exit", "killed by SIGTERM", "10.0.0.2", 7, -15),
        otlp.Severity.WARN,
        {**PROCESS, "fleetlight.signal": "SIGTERM"},
    ),
    (
        Event(1.0, "worker 1", "exit", "killed by signal 99", "10.0.0.2", 7, -99),
        otlp.Severity.ERROR,
        {**PROCESS, "fleetlight.signal": "99"},
    ),
    *(
        (
            Event(1.0, "worker 1", kind, "some text", pid=7, step=40),
            otlp.Severity.INFO,
            {**PROCESS, "fleetlight.step": 40},
        )
        for kind in ("checkpoint", "resume", "publication", "join")
    ),
    (
        Event(1.0, "fleetrun", "end", "ended with code 0", "10.0.0.1", status=0),
        otlp.Severity.INFO,
        {"fleetlight.role": "fleetrun", "host.name": "10.0.0.1", "process.exit.code": 0},
    ),
    (
        Event(1.0, "fleetrun", "end", "ended with code 75", "10.0.0.1", status=75),
        otlp.Severity.WARN,
        {"fleetlight.role": "fleetrun", "host.name": "10.0.0.1", "process.exit.code": 75},
    ),
    (
        Event(1.0, "worker 1", "exit", "exited with code 3"),
        otlp.Severity.INFO,
        {**WORKER, "host.name": "10.0.0.2"},
    ),
]


@pytest.mark.parametrize(("event", "expected", "found"), CASES)
def test_event_as_a_record(
    event: Event, expected: otlp.Severity, found: dict[str, str | int]
) -> None:
    assert otlp.event_name(event) == f"fleetlight.{event.kind}"
    assert otlp.severity(event) is expected
    assert otlp.attributes(event, host="10.0.0.2") == found
    assert otlp.body(event) == f"{event.who}: {event.text}"


def test_a_job_that_has_saved_ends_on_request() -> None:
    assert {RESUME_CODE, exit_code(-15), exit_code(-2)} <= otlp.ON_REQUEST


FAR_S = 60.0


def until(seconds: float = FAR_S) -> float:
    return time.monotonic() + seconds


class Service:
    """Takes items once `opens` is set; fails the first attempts."""

    def __init__(self, failures: int = 0) -> None:
        self.taken: list[int] = []
        self.failures = failures
        self.was_called, self.opens = threading.Event(), threading.Event()

    def send(self, batch: Sequence[int]) -> otlp.DeliveryOutcome:
        self.was_called.set()
        assert self.opens.wait(FAR_S)
        if self.failures:
            self.failures -= 1
            return otlp.DeliveryOutcome.LOST
        self.taken += batch
        return otlp.DeliveryOutcome.ARRIVED


def test_all_items_arrive_in_their_order() -> None:
    service = Service()
    service.opens.set()
    delivery = otlp.Delivery(service.send)
    for number in range(2000):
        delivery.add(number)
    assert delivery.close(until()) == 0
    assert service.taken == list(range(2000))


def test_a_service_that_comes_back_gets_what_it_lacks() -> None:
    service = Service(failures=2)
    service.opens.set()
    delivery = otlp.Delivery(service.send, retry_s=0.001)
    delivery.add(1)
    while service.failures:
        assert service.was_called.wait(FAR_S)
        service.was_called.clear()
    delivery.add(2)
    assert delivery.close(until()) == 0
    assert service.taken == [1, 2]


def test_the_oldest_are_dropped_and_counted() -> None:
    service = Service()
    delivery = otlp.Delivery(service.send, most=3)
    delivery.add(0)
    assert service.was_called.wait(FAR_S)
    # the first is on its way: it arrives, although its place is given away
    for number in range(1, 6):
        delivery.add(number)
    service.opens.set()
    assert delivery.close(until()) == 2
    assert service.taken == [0, 3, 4, 5]


def test_the_end_makes_one_last_attempt() -> None:
    service = Service(failures=1)
    service.opens.set()
    delivery = otlp.Delivery(service.send, retry_s=FAR_S)
    delivery.add(1)
    assert service.was_called.wait(FAR_S)
    assert delivery.close(until()) == 0
    assert service.taken == [1]


def test_a_service_that_fails_at_the_end_lacks_the_rest() -> None:
    service = Service(failures=9)
    service.opens.set()
    delivery = otlp.Delivery(service.send, retry_s=FAR_S)
    delivery.add(1)
    delivery.add(2)
    assert delivery.close(until()) == 2
    assert service.failures >= 7


def test_a_service_that_does_not_answer_delays_the_end_by_no_more_than_asked() -> None:
    service = Service()
    delivery = otlp.Delivery(service.send)
    delivery.add(1)
    assert service.was_called.wait(FAR_S)
    assert delivery.close(until(0.0)) == 1
    service.opens.set()


def test_an_item_that_the_service_refuses_does_not_delay_the_others_for_ever() -> None:
    arrived: list[int] = []
    is_done = threading.Event()

    def send(batch: Sequence[int]) -> otlp.DeliveryOutcome:
        if 7 in batch or len(batch) > 100:
            return otlp.DeliveryOutcome.REFUSED
        arrived.extend(batch)
        if len(arrived) == 299:
            is_done.set()
        return otlp.DeliveryOutcome.ARRIVED

    delivery = otlp.Delivery(send, retry_s=0.0)
    for number in range(300):
        delivery.add(number)
    assert is_done.wait(30)
    assert sorted(arrived) == [number for number in range(300) if number != 7]
    assert delivery.close(time.monotonic() + 5) == 1


def test_an_item_that_is_refused_at_the_end_keeps_no_other_back() -> None:
    arrived: list[int] = []

    def send(batch: Sequence[int]) -> otlp.DeliveryOutcome:
        if 700 in batch:
            return otlp.DeliveryOutcome.REFUSED
        arrived.extend(batch)
        return otlp.DeliveryOutcome.ARRIVED

    delivery = otlp.Delivery(send, retry_s=FAR_S)
    for number in range(2000):
        delivery.add(number)
    assert delivery.close(until()) == 1
    assert sorted(arrived) == [number for number in range(2000) if number != 700]


def test_a_service_that_refuses_all_ends_the_attempts() -> None:
    asked: list[int] = []

    def send(batch: Sequence[int]) -> otlp.DeliveryOutcome:
        asked.append(len(batch))
        return otlp.DeliveryOutcome.REFUSED

    delivery = otlp.Delivery(send, retry_s=FAR_S)
    for number in range(2000):
        delivery.add(number)
    assert delivery.close(until()) == 2000
    assert len(asked) < 30
