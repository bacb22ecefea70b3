# SPDX-License-Identifier: Apache-2.0
"""`EventExporter`: sends the events of a job to a collector of OpenTelemetry, by OTLP over HTTP.

Each event is a log record. Each incarnation of a process is a span, from its start to its exit, in
the span of the job. The SDK reads its own variables, OTEL_EXPORTER_OTLP_* among them.
"""

from __future__ import annotations

import enum
import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from opentelemetry import context as otel_context
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import (
    LoggerProvider,
    LogRecordProcessor,
    ReadableLogRecord,
    ReadWriteLogRecord,
)
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context

from fleetlight.observe.telemetry.snapshot import Event
from fleetlight.version import VERSION

T = TypeVar("T")

_BATCH = 512
#: the pause after the first failure; each further one doubles it
_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


class DeliveryOutcome(enum.Enum):
    """What became of items that were sent."""

    ARRIVED = enum.auto()
    #: the service has answered that it does not take them
    REFUSED = enum.auto()
    #: the service has not answered
    LOST = enum.auto()


class Delivery(Generic[T]):
    """Sends items in their order; a service that fails gets them again later.

    One that the service refuses while the next arrives is dropped, and counts as such.
    """

    def __init__(
        self,
        send: Callable[[Sequence[T]], DeliveryOutcome],
        most: int | None = None,
        retry_s: float = _RETRY_S,
    ) -> None:
        """`most`: how many items may wait."""
        self._send, self._most, self._retry_s = send, most, retry_s
        self._waiting: list[T] = []
        self._dropped = 0
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="fleet-delivery", daemon=True)
        self._thread.start()

    def add(self, item: T) -> None:
        """Send an item soon; if too many wait, the oldest is dropped."""
        with self._changed:
            self._waiting.append(item)
            if self._most is not None and len(self._waiting) > self._most:
                del self._waiting[0]
                self._dropped += 1
            self._changed.notify()

    def close(self, until: float) -> int:
        """Send the rest until a monotonic time; returns how many items the service lacks.

        A service that does not answer, or takes nothing, ends this early.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(max(0.0, until - time.monotonic()))
        with self._changed:
            return self._dropped + len(self._waiting)

    def _run(self) -> None:
        pause, size = self._retry_s, _BATCH
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                batch, dropped = self._waiting[:size], self._dropped
                is_last = self._is_closing
            if not batch:
                return
            outcome = self._send(batch)
            if outcome is DeliveryOutcome.ARRIVED:
                pause, size = self._retry_s, _BATCH
                self._remove(len(batch), dropped)
            elif len(batch) == 1 and self._next_arrives():
                size = _BATCH
            elif is_last and (outcome is DeliveryOutcome.LOST or len(batch) == 1):
                return
            else:
                # the service may refuse one of them, or so many
                size = max(1, len(batch) // 2)
                self._await_close(pause)
                pause = min(2 * pause, _MAX_RETRY_S)

    def _next_arrives(self) -> bool:
        """Send the second item; if it arrives, the service refuses the first, which is dropped."""
        with self._changed:
            two = self._waiting[:2]
        if len(two) < 2 or self._send(two[1:]) is not DeliveryOutcome.ARRIVED:
            return False
        with self._changed:
            left = [item for item in self._waiting if item is not two[1]]
            self._waiting = [item for item in left if item is not two[0]]
            self._dropped += len(left) - len(self._waiting)
        return True

    def _remove(self, arrived: int, dropped_before: int) -> None:
        with self._changed:
            # some may have been dropped while they were on their way
            gone = min(arrived, self._dropped - dropped_before)
            self._dropped -= gone
            del self._waiting[: arrived - gone]

    def _await_close(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing, seconds)


_PREFIX = "fleetlight."
#: exits that a user or an engine asks for: SIGINT and SIGTERM, with the codes of shells, and 75,
#: the exit code of a job that has saved and can resume
ON_REQUEST = frozenset({-signal.SIGINT, -signal.SIGTERM, 130, 143, 75})


class Severity(enum.IntEnum):
    """The severities that events have, by their numbers in OpenTelemetry."""

    INFO = 9
    WARN = 13
    ERROR = 17


def event_name(event: Event) -> str:
    """Such as `fleetlight.exit`."""
    return f"{_PREFIX}{event.kind}"


def severity(event: Event) -> Severity:
    """ERROR for a process or a job that fails; WARN for a restart and an exit on request."""
    if event.status:
        return Severity.WARN if event.status in ON_REQUEST else Severity.ERROR
    return Severity.WARN if event.kind == "restart" else Severity.INFO


def body(event: Event) -> str:
    """The sentence."""
    return f"{event.who}: {event.text}"


def attributes(event: Event, host: str = "") -> dict[str, str | int]:
    """What the event says, each as its own value; `host` is for events that name none."""
    role, _, index = event.who.partition(" ")
    killed = event.status is not None and event.status < 0
    found: dict[str, str | int | None] = {
        "fleetlight.role": role,
        "fleetlight.index": int(index) if index.isdecimal() else None,
        "host.name": event.host or host or None,
        "process.pid": event.pid,
        "process.exit.code": None if killed else event.status,
        "fleetlight.signal": _signal_name(-event.status) if killed and event.status else None,
        "fleetlight.restart": event.restart or None,
        "fleetlight.step": event.step,
    }
    return {name: value for name, value in found.items() if value is not None}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


_SCOPE = "fleetlight"
#: the cause in the middle of a message of the SDK, where the batch may arrive another time
_CAUSE = re.compile(r"\[Errno -?\d+\] [\w ]+|[\w ]*timed out|timeout, max retries or shutdown")
EVENTS, SPANS = "events", "spans"
#: what each logger of the SDK is about
_LOGGERS = {OTLPLogExporter.__module__: EVENTS, OTLPSpanExporter.__module__: SPANS}
_STARTS = ("start", "restart")
_END = "end"


class ExportedJob(NamedTuple):
    """What the resource of all records says of the job."""

    #: which run this is, as in `endpoints.log`
    id: str
    #: what it runs
    name: str


class EventExporter:
    """Sends the events of one job."""

    def __init__(
        self, job: ExportedJob, warn: Callable[[str, str], None], most: int | None = None
    ) -> None:
        """`warn` gets what fails first, and why; `most` bounds the records that wait."""
        self._failures = _Failures(warn)
        logs, spans = OTLPLogExporter(), OTLPSpanExporter()
        self._logs: Delivery[ReadableLogRecord] = Delivery(
            self._failures.guarded(EVENTS, logs.export, LogRecordExportResult.SUCCESS), most
        )
        self._spans: Delivery[ReadableSpan] = Delivery(
            self._failures.guarded(SPANS, spans.export, SpanExportResult.SUCCESS), most
        )
        resource = resource_of(job)
        loggers = LoggerProvider(resource, shutdown_on_exit=False)
        loggers.add_log_record_processor(_LogRecords(self._logs.add))
        tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        tracers.add_span_processor(_EndedSpans(self._spans.add))
        self._logger = loggers.get_logger(_SCOPE, VERSION)
        self._trace = JobTrace(tracers.get_tracer(_SCOPE, VERSION), job.name)

    def add(self, events: Sequence[Event]) -> None:
        """Send events soon; in the order of their times."""
        for event in events:
            context, host = self._trace.follow(event)
            level = severity(event)
            record = LogRecord(
                timestamp=_nanoseconds(event.at),
                context=context,
                severity_number=SeverityNumber(level.value),
                severity_text=level.name,
                body=body(event),
                attributes=attributes(event, host),
                event_name=event_name(event),
            )
            self._logger.emit(record)

    def end_trace(self) -> None:
        """End the span of the job, once the job is over."""
        self._trace.end()

    def close(self, within_s: float) -> tuple[int, int]:
        """Send the rest; returns how many events and spans the collector lacks."""
        until = time.monotonic() + within_s
        return self._logs.close(until), self._spans.close(until)

    @property
    def failure(self) -> str:
        """Why the collector does not take all; "" if it does."""
        return self._failures.reason


class JobTrace:
    """The spans of a job: one for the job, and in it one for each incarnation of a process."""

    def __init__(self, tracer: Tracer, name: str) -> None:
        self._tracer, self._name = tracer, name
        self._job: Span | None = None
        #: by name and pid, including those that have ended: a process may record events late
        self._incarnations: dict[tuple[str, int | None], tuple[Span, str]] = {}
        self._running: dict[str, Span] = {}
        self._last = 0

    def follow(self, event: Event) -> tuple[Context, str]:
        """The span in which an event happens, and the host of its process."""
        at = _nanoseconds(event.at)
        self._last = max(self._last, at)
        if self._job is None:
            # no span of this process is the parent
            self._job = self._tracer.start_span(self._name, otel_context.Context(), start_time=at)
        key = (event.who, event.pid)
        if event.kind in _STARTS:
            self._start(event, at, self._job)
        span, host = self._incarnations.get(key, (self._job, ""))
        if event.status is not None and event.kind == _END:
            _judge(self._job, event)
        elif event.status is not None and key in self._incarnations:
            # the start of others is not known: only their record says how they ended
            _judge(span, event)
            span.end(at)
            self._running.pop(event.who, None)
        return set_span_in_context(span, otel_context.Context()), host

    def end(self) -> None:
        """End all spans, at the time of the last event."""
        for span in self._running.values():
            span.end(self._last)
        self._running.clear()
        if self._job is not None:
            self._job.end(self._last)

    def _start(self, event: Event, at: int, job: Span) -> None:
        before = self._running.pop(event.who, None)
        if before is not None:
            # a launcher that was lost has recorded no exit
            before.end(at)
        parent = set_span_in_context(job, otel_context.Context())
        found = attributes(event)
        span = self._tracer.start_span(event.who, parent, start_time=at, attributes=found)
        self._running[event.who] = span
        self._incarnations[(event.who, event.pid)] = (span, event.host)


def resource_of(job: ExportedJob) -> Resource:
    """What all records share; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first."""
    own = {
        "service.name": "fleetlight",
        "service.version": VERSION,
        "fleetlight.job.id": job.id,
        "fleetlight.job.name": job.name,
    }
    return Resource.create(own).merge(OTELResourceDetector().detect())


def _judge(span: Span, event: Event) -> None:
    """What a span says about its end."""
    for name, value in attributes(event).items():
        span.set_attribute(name, value)
    if severity(event) is Severity.ERROR:
        span.set_status(Status(StatusCode.ERROR, event.text))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


class _Failures(logging.Handler):
    """Tells the user of the first failure only; the SDK would log each attempt."""

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._warn: Callable[[str, str], None] | None = warn
        self._looking = threading.Lock()
        #: why the collector takes no events, or no spans; "" if it does
        self._reasons = dict.fromkeys(_LOGGERS.values(), "")
        #: the same of the attempt that runs
        self._said = dict(self._reasons)
        sdk = logging.getLogger("opentelemetry")
        sdk.handlers, sdk.propagate = [self], False
        for name in _LOGGERS:
            # they omit what the SDK has said before: the cause, if it comes back
            logging.getLogger(name).filters.clear()

    @property
    def reason(self) -> str:
        """Why the collector does not take all; "" if it does."""
        # the first attempt may still run, since the SDK tries for 10 s
        found = [self._reasons[what] or self._said[what] for what in self._reasons]
        return "; ".join(dict.fromkeys(filter(None, found)))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what the SDK says."""
        if record.name in _LOGGERS:
            self._keep(_LOGGERS[record.name], record.getMessage())

    def guarded(
        self, what: str, export: Callable[[Sequence[T]], object], success: object
    ) -> Callable[[Sequence[T]], DeliveryOutcome]:
        """The same as a function that never raises, and says what became of the batch."""

        def send(batch: Sequence[T]) -> DeliveryOutcome:
            self._said[what] = ""
            try:
                has_arrived = export(batch) is success
            except Exception as error:
                # some versions of the SDK raise what the connection raises
                self._keep(what, str(error))
                has_arrived = False
            if not has_arrived and _CAUSE.fullmatch(self._said[what]):
                outcome = DeliveryOutcome.LOST
            else:
                outcome = DeliveryOutcome.ARRIVED if has_arrived else DeliveryOutcome.REFUSED
            self._look(what, has_arrived)
            return outcome

        return send

    def _keep(self, what: str, text: str) -> None:
        # what the SDK says later is that it gives up
        if not self._said[what]:
            cause = _CAUSE.search(text)
            self._said[what] = text if cause is None else cause[0]

    def _look(self, what: str, has_arrived: bool) -> None:
        # records and spans have a thread each
        with self._looking:
            if has_arrived:
                self._said[what] = ""
            self._reasons[what] = self._said[what]
            if not has_arrived and self._warn is not None:
                warn, self._warn = self._warn, None
                warn(what, self._reasons[what] or "no answer")


class _LogRecords(LogRecordProcessor):
    """Passes each record on to its delivery."""

    def __init__(self, add: Callable[[ReadableLogRecord], None]) -> None:
        self._add = add

    def on_emit(self, log_record: ReadWriteLogRecord) -> None:
        """Pass a record on."""
        self._add(
            ReadableLogRecord(
                log_record=log_record.log_record,
                resource=log_record.resource or Resource.get_empty(),
                instrumentation_scope=log_record.instrumentation_scope,
                limits=log_record.limits,
            )
        )

    def shutdown(self) -> None:
        """Nothing: the exporter ends the delivery."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing: the exporter ends the delivery."""
        return True


class _EndedSpans(SpanProcessor):
    """Passes each span that has ended on to its delivery."""

    def __init__(self, add: Callable[[ReadableSpan], None]) -> None:
        self._add = add

    def on_end(self, span: ReadableSpan) -> None:
        """Pass a span on."""
        self._add(span)
