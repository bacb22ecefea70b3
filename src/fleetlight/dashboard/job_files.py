# SPDX-License-Identifier: Apache-2.0
"""`JobFiles`: reads what the log folder of a job says besides metrics."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetlight.dashboard.view.facts import (
    LogFolderFacts,
    ProcessFacts,
    ProcessState,
    how_ended,
)
from fleetlight.launch.process_identity import Presence, presence, this_system
from fleetlight.launch.processes.logs import ENDPOINTS
from fleetlight.launch.processes.record import LauncherRecord, ProcessEntry, read_records
from fleetlight.observe.telemetry.snapshot import FOLDER

#: what worker 0 writes about the job: the text of explain(), the picture of its program
DESCRIPTION = "job.json"
_MAX_BYTES = 4 << 20
_ENDPOINT = re.compile(r"(?P<name>(server|worker) \d+) (?P<host>.+):\d+")
_MEMINFO = Path("/proc/meminfo")


class JobFiles:
    """Reads a log folder again and again; a file is only read when it has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, tuple[tuple[int, int, int], bytes]] = {}
        self._description: dict[str, Any] = {}
        self._described = b""

    def read(self) -> LogFolderFacts:
        """The facts now."""
        records = self._records()
        processes: dict[str, ProcessFacts] = {}
        for record in records:
            for entry in record.processes:
                processes.setdefault(entry.name, _facts(record, entry))
        for name, host in self._endpoints().items():
            processes.setdefault(name, ProcessFacts(name=name, host=host))
        here = this_system().hostname
        return LogFolderFacts(
            job=records[0].job if records else "",
            folder=self._folder.name,
            processes=processes,
            is_over=bool(records) and all(_is_over(record) for record in records),
            code=next((record.code for record in records if record.code is not None), None),
            free_bytes={one.host: _free_bytes() for one in records if one.system.hostname == here},
            description=self._read_description(),
        )

    @property
    def picture(self) -> str | None:
        """The picture of the job's program as SVG."""
        found = self._read_description_whole().get("svg")
        return found if isinstance(found, str) else None

    def _records(self) -> list[LauncherRecord]:
        found: list[LauncherRecord] = []
        with contextlib.suppress(OSError):
            found = [record for record, _ in read_records(self._folder)]
        # a launcher that has replaced a lost one comes first
        return sorted(found, key=_is_over)

    def _endpoints(self) -> Mapping[str, str]:
        lines = self._content(self._folder / ENDPOINTS).decode(errors="replace").splitlines()
        found = (_ENDPOINT.fullmatch(line) for line in lines)
        return {one["name"]: one["host"] for one in found if one is not None}

    def _read_description(self) -> Mapping[str, Any]:
        whole = self._read_description_whole()
        said = {key: whole[key] for key in ("explain", "mode") if isinstance(whole.get(key), str)}
        return {**said, "picture": isinstance(whole.get("svg"), str)}

    def _read_description_whole(self) -> Mapping[str, Any]:
        data = self._content(self._folder / FOLDER / DESCRIPTION)
        if data != self._described:
            self._described, self._description = data, {}
            with contextlib.suppress(ValueError):
                found = json.loads(data)
                self._description = found if isinstance(found, dict) else {}
        return self._description

    def _content(self, path: Path) -> bytes:
        """The bytes of a file; none if it is missing or too large."""
        try:
            status = path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            known = self._known.get(path)
            if known is not None and known[0] == stamp:
                return known[1]
            data = path.read_bytes() if status.st_size <= _MAX_BYTES else b""
        except OSError:
            return b""
        self._known[path] = (stamp, data)
        return data


def _is_over(record: LauncherRecord) -> bool:
    if record.ended:
        return True
    return presence(record.pid, record.start, record.system) is Presence.ENDED


def _facts(record: LauncherRecord, entry: ProcessEntry) -> ProcessFacts:
    state, detail = ProcessState.RUNNING, ""
    if entry.status is not None:
        state = ProcessState.FAILED if entry.status else ProcessState.ENDED
        detail = how_ended(entry.status)
    elif _is_over(record):
        left = presence(entry.pid, entry.start, record.system)
        state = ProcessState.RUNNING if left is Presence.RUNNING else ProcessState.ENDED
        detail = "its launcher has ended"
    return ProcessFacts(
        name=entry.name,
        host=record.host,
        pid=entry.pid,
        state=state,
        detail=detail,
        restarts=entry.restarts,
    )


def _free_bytes() -> int:
    """Memory that programs of this machine can still allocate."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines: Sequence[str] = _MEMINFO.read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) << 10
    return 0
