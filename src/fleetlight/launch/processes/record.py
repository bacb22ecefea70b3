# SPDX-License-Identifier: Apache-2.0
"""The file in the log folder that says which processes a launcher has started.

`fleetlight ps`, `logs` and `stop` read it. It has no arguments, variables or secrets.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence

import msgspec

from fleetlight.files.atomic import replace_file
from fleetlight.launch.process_identity import System, start_of, this_system
from fleetlight.launch.processes.failure import how
from fleetlight.observe.telemetry.recorder import EventFile

#: a log folder may have the files of several launchers of one job
PATTERN = "launcher.*.json"
_MAX_BYTES = 16 << 20


class ProcessEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One process of a job."""

    #: `worker 1`
    name: str
    pid: int
    #: in ticks since the boot; None where the system does not say it
    start: int | None
    #: the exit code, or -N for signal N; None while the process runs
    status: int | None = None
    restarts: int = 0


class LauncherRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A launcher and its processes."""

    job: str
    #: what the job runs: the name of its script
    name: str = ""
    #: the address of this machine in the job
    host: str
    system: System
    pid: int
    start: int | None
    #: True once fleetrun has ended its processes
    ended: bool = False
    #: its exit code, if it has reached one
    code: int | None = None
    processes: tuple[ProcessEntry, ...] = ()


class RecordFile:
    """The record of this launcher, replaced as a whole at each change, which is an event."""

    def __init__(self, folder: pathlib.Path, job: str, host: str, name: str = "") -> None:
        pid = os.getpid()
        self._events = EventFile(folder, f"fleetrun.{host}.{pid}", "fleetrun", host)
        self._path = folder / PATTERN.replace("*", f"{host}.{pid}")
        self._record = LauncherRecord(
            job=job, name=name, host=host, system=this_system(), pid=pid, start=start_of(pid)
        )
        self._write()

    def update(self, processes: Sequence[ProcessEntry]) -> None:
        """Record the processes."""
        for entry, kind, text in changes(self._record.processes, processes):
            is_restart, has_ended = kind == "restart", kind == "exit"
            self._events.add(
                kind,
                text,
                entry.name,
                pid=entry.pid,
                status=entry.status if has_ended else None,
                restart=entry.restarts if is_restart else 0,
            )
        self._replace(processes=tuple(processes))

    def conclude(self, code: int) -> None:
        """Record the exit code of fleetrun."""
        self._events.add("end", f"ended with code {code}", status=code)
        self._replace(code=code)

    def close(self) -> None:
        """Record that no process is left."""
        self._replace(ended=True)

    def _replace(self, **changes: object) -> None:
        self._record = msgspec.structs.replace(self._record, **changes)
        self._write()

    def _write(self) -> None:
        # the job continues on a full disk
        with contextlib.suppress(OSError):
            data = msgspec.json.format(msgspec.json.encode(self._record))
            replace_file(self._path, data, mode=0o600, unique=True, durable=False)


def changes(
    before: Sequence[ProcessEntry], after: Sequence[ProcessEntry]
) -> Iterator[tuple[ProcessEntry, str, str]]:
    """Each process that has started or ended, the kind of the event, and a text."""
    known = {entry.name: entry for entry in before}
    for entry in after:
        last = known.get(entry.name)
        if last is None or (last.pid, last.restarts) != (entry.pid, entry.restarts):
            again = f"restart {entry.restarts}" if entry.restarts else "started"
            yield entry, "restart" if entry.restarts else "start", f"{again}, pid {entry.pid}"
            last = None
        if entry.status is not None and (last is None or last.status is None):
            yield entry, "exit", how(entry.status)


def read_records(folder: pathlib.Path) -> list[tuple[LauncherRecord, int]]:
    """The records in a folder, each with the user who owns its file; damaged ones are omitted."""
    found = []
    for path in sorted(folder.glob(PATTERN)):
        # another run moves them away; what is damaged is no record
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
            found.append(_read(path))
    return found


def _read(path: pathlib.Path) -> tuple[LauncherRecord, int]:
    # a link would lend a record the owner of another file
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        record = msgspec.json.decode(file.read(_MAX_BYTES), type=LauncherRecord)
        return record, os.fstat(descriptor).st_uid
