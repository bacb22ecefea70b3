# SPDX-License-Identifier: Apache-2.0
"""`fleetlight events`: what happened in a job, printed or sent to OpenTelemetry."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fleetlight.dashboard.job_files import JobFiles
from fleetlight.errors import ConfigError, LaunchError, counted
from fleetlight.launch.process_identity import this_system
from fleetlight.launch.processes.followers.event_export import ENDPOINT, check_packages
from fleetlight.launch.processes.logs import relative
from fleetlight.launch.processes.record import read_records
from fleetlight.observe.telemetry.history import EventFiles
from fleetlight.observe.telemetry.snapshot import FOLDER, Event

if TYPE_CHECKING:
    from fleetlight.observe.sinks.otlp import EventExporter, ExportedJob

_REMEDY = f"look whether a collector runs, and whether {ENDPOINT} is its address"
_EVERY_S = 0.25
#: how long the rest is sent: after a job that fleetrun still holds, and for a user who waits
_FLUSH_S, _PATIENT_FLUSH_S = 3.0, 30.0
#: how many records may wait while a job runs
_MAX_RECORDS = 10_000


def add_events(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    events = commands.add_parser(
        "events",
        help="print what happened in a job, or send it to OpenTelemetry",
        description="Prints starts, exits, restarts, checkpoints and publications of a job, "
        "which may have ended. With --export it sends them to a collector of OpenTelemetry, "
        f"by OTLP over HTTP, to {ENDPOINT} (default: http://localhost:4318).",
    )
    events.add_argument("folder", metavar="LOGDIR", help="the log folder of the job")
    events.add_argument("--json", action="store_true", help="print each event as a line of JSON")
    events.add_argument(
        "-f", "--follow", action="store_true", help="continue with what follows until the job ends"
    )
    events.add_argument(
        "--export", action="store_true", help="send the events in place of printing them"
    )
    # started by fleetrun, which says how the job ends
    events.add_argument("--of_fleetrun", action="store_true", help=argparse.SUPPRESS)
    events.set_defaults(command=_events)


def _events(found: argparse.Namespace) -> int:
    folder = Path(found.folder)
    if found.export and found.json:
        raise ConfigError("fleetlight events: --export prints no events; omit it, or --json")
    if found.of_fleetrun:
        return _export_live(folder)
    if not (folder / FOLDER).is_dir():
        raise ConfigError(
            f"{folder} has no folder {FOLDER!r}; expected the log folder of a job that fleetrun "
            "has started"
        )
    if found.export:
        return _export(folder, follow=found.follow)
    for events in _read(folder, _until(folder, follow=found.follow)):
        for event in events:
            print(msgspec.json.encode(event).decode() if found.json else _line(event), flush=True)
    return 0


def _line(event: Event) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
    return f"{moment}  {event.who:<9}  {event.kind:<11}  {event.text}"


def _read(folder: Path, is_last: Callable[[], bool]) -> Iterator[list[Event]]:
    """The events until now, then those that follow, until `is_last`."""
    files = EventFiles(folder)
    while True:
        # asked first: what is recorded before the end is read after it
        ends = is_last()
        yield files.poll()
        if ends:
            return
        time.sleep(_EVERY_S)


def _until(folder: Path, *, follow: bool) -> Callable[[], bool]:
    """True once the job is over; without `follow` always."""
    job = JobFiles(folder)
    return (lambda: job.read().is_over) if follow else (lambda: True)


def _launcher_has_ended(folder: Path) -> bool:
    """True once the launcher that has started this process has ended its job."""
    launcher, here = os.getppid(), this_system()
    with contextlib.suppress(OSError):
        records = [record for record, _ in read_records(folder)]
        return any(one.ended and (one.pid, one.system) == (launcher, here) for one in records)
    return False


def _export(folder: Path, *, follow: bool) -> int:
    """Send events for a user."""
    export = _Export(folder, _MAX_RECORDS if follow else None, "fleetlight")
    # on Ctrl-C, what was read is sent
    with contextlib.suppress(KeyboardInterrupt):
        export.run(_until(folder, follow=follow))
    missing = export.close(_PATIENT_FLUSH_S, is_over=JobFiles(folder).read().is_over)
    if missing:
        raise LaunchError(f"{missing}; {_REMEDY}")
    print(f"sent {counted(export.count, 'event', ',')}")
    return 0


def _export_live(folder: Path) -> int:
    """Send the events of a job while fleetrun runs it."""
    export = _Export(folder, _MAX_RECORDS, "fleetrun")
    export.run(lambda: _launcher_has_ended(folder))
    missing = export.close(_FLUSH_S, is_over=True)
    if missing:
        kind = "" if export.has_warned else "warning: "
        export.say(f"{kind}{missing}; to send all: fleetlight events {relative(folder)} --export")
    return 0


class _Export:
    """The events of a log folder, on their way to a collector."""

    def __init__(self, folder: Path, most: int | None, program: str) -> None:
        """`most` bounds the records that wait; messages start with the name of `program`."""
        check_packages()
        self._folder, self._most, self._program = folder, most, program
        self._exporter: EventExporter | None = None
        self._is_closing = False
        self.has_warned = False
        #: how many events the folder has
        self.count = 0

    def run(self, is_last: Callable[[], bool]) -> None:
        """Send what the folder has, then what follows, until `is_last`."""
        for events in _read(self._folder, is_last):
            if not events:
                continue
            if self._exporter is None:
                # imported late, since the SDK is only for those who export
                from fleetlight.observe.sinks.otlp import EventExporter

                self._exporter = EventExporter(self._identity(), self._warn, self._most)
            self._exporter.add(events)
            self.count += len(events)

    def close(self, within_s: float, *, is_over: bool) -> str:
        """Send the rest; returns what the collector lacks, "" if it has all."""
        if self._exporter is None:
            return ""
        self._is_closing = True
        if is_over:
            self._exporter.end_trace()
        events, spans = self._exporter.close(within_s)
        lacks = [counted(events, "event", ",")] * bool(events)
        lacks += [counted(spans, "span", ",")] * bool(spans)
        why = self._exporter.failure or "no answer in time"
        return f"{' and '.join(lacks)} did not reach OpenTelemetry: {why}" if lacks else ""

    def say(self, text: str) -> None:
        """Print a line of this export; the script's output is on the other stream."""
        print(f"{self._program}: {text}", file=sys.stderr, flush=True)

    def _warn(self, what: str, reason: str) -> None:
        if not self._is_closing:
            self.has_warned = True
            text = f"warning: OpenTelemetry takes no {what}: {reason}; {_REMEDY}"
            if self._most is not None:
                text += f". The job continues, and its newest {self._most:,} {what} wait"
            self.say(text)

    def _identity(self) -> ExportedJob:
        from fleetlight.observe.sinks.otlp import ExportedJob

        for record, _ in read_records(self._folder):
            return ExportedJob(record.job, record.name)
        return ExportedJob("", self._folder.resolve().name)
