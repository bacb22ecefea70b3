# SPDX-License-Identifier: Apache-2.0
"""A job's log folder as its processes would write it, with metrics that a test chooses."""

import dataclasses
import os
import random
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fleetlight.launch.process_identity import start_of, this_system
from fleetlight.launch.processes.record import LauncherRecord, ProcessEntry
from fleetlight.observe.telemetry.catalogue import STEP_PARTS, step_metric
from fleetlight.observe.telemetry.snapshot import (
    EVENTS_PREFIX,
    FOLDER,
    Event,
    Snapshot,
    labelled,
    line_of,
    snapshot_file,
)

#: seconds of each part of a step
USUAL = dict(zip(STEP_PARTS, (0.005, 0.02, 0.01, 0.03, 0.01, 0.008, 0.004, 0.003), strict=True))


@dataclasses.dataclass
class SimulatedWorker:
    """A worker whose steps take what `parts` says."""

    index: int
    parts: dict[str, float] = dataclasses.field(default_factory=lambda: dict(USUAL))
    logged: dict[str, float] = dataclasses.field(default_factory=dict)
    pid: int = 1000
    seconds: float = 0.0

    def values(self) -> dict[str, float]:
        steps = self.seconds / sum(self.parts.values())
        return {
            "steps": float(int(steps)),
            "samples": float(int(steps)) * 512,
            **{step_metric(part): took * steps for part, took in self.parts.items()},
            **{labelled("logged", name): value for name, value in self.logged.items()},
            "queued_pushes": 1.0,
            "skipped_steps": 0.0,
            "sent_bytes": 1e6 * self.seconds,
            "received_bytes": 3e6 * self.seconds,
            "rows_read_ahead": 900 * steps,
            "rows_on_demand": 100 * steps,
            "cpu_seconds": 0.9 * self.seconds,
            "resident_bytes": 4e8,
        }


class SimulatedJob:
    """Writes the files of a job, second by second."""

    def __init__(self, folder: Path, workers: int, servers: int, start: float = 1e9) -> None:
        self.folder, self.at = folder, start
        self.workers = [SimulatedWorker(index, pid=1000 + index) for index in range(workers)]
        self.servers = servers
        self.tables = {"users": 1e6, "items": 2e5}
        #: rows of a table that appear in a second, on each server
        self.growth = 100.0
        self.statuses: dict[str, int] = {}
        self.restarts: dict[str, int] = {}
        self.code: int | None = None
        self._passed = 0.0
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)

    def run(self, seconds: int, jitter: random.Random | None = None) -> None:
        """Let every running process record once a second."""
        for _ in range(seconds):
            self.at += 1.0
            self._passed += 1.0
            for worker in self.workers:
                if f"worker {worker.index}" not in self.statuses:
                    worker.seconds += 1.0
                    shift = jitter.uniform(-0.2, 0.2) if jitter else 0.0
                    self.record("worker", worker.index, worker.pid, worker.values(), shift=shift)
            for index in range(self.servers):
                if f"server {index}" not in self.statuses:
                    self.record("server", index, 2000 + index, *self._server_values())

    def _server_values(self) -> tuple[dict[str, float], dict[str, dict[int, int]]]:
        rows = {name: count + self.growth * self._passed for name, count in self.tables.items()}
        pushes = int(10 * self._passed)
        values = {
            "applied_pushes": float(pushes),
            "cpu_seconds": 0.5 * self._passed,
            "resident_bytes": 2e8,
            **{labelled("table_rows", name): count for name, count in rows.items()},
            **{labelled("table_bytes", name): count * 64 for name, count in rows.items()},
        }
        return values, {"staleness": {0: pushes, 1: 2 * pushes, 3: pushes}}

    def record(
        self,
        kind: str,
        index: int,
        pid: int,
        values: Mapping[str, float],
        counts: Mapping[str, dict[int, int]] | None = None,
        shift: float = 0.0,
    ) -> None:
        """Append a snapshot of a process."""
        snapshot = Snapshot(self.at + shift, pid, dict(values), dict(counts or {}))
        with (self.folder / FOLDER / snapshot_file(kind, index)).open("ab") as file:
            file.write(line_of(snapshot) + b"\n")

    def event(self, who: str, kind: str, text: str, **more: Any) -> None:
        """Append an event."""
        with (self.folder / FOLDER / f"{EVENTS_PREFIX}test.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(Event(self.at, who, kind, text, **more)) + b"\n")

    def launcher(self, *, ended: bool = False, only: Collection[str] = ()) -> None:
        """Write the record of the launcher, which is this process; `only`: its processes."""
        entries = [
            ProcessEntry(
                name=name,
                pid=pid,
                start=None,
                status=self.statuses.get(name),
                restarts=self.restarts.get(name, 0),
            )
            for name, pid in self._names()
            if not only or name in only
        ]
        pid = os.getpid()
        record = LauncherRecord(
            job="job-1",
            host="127.0.0.1",
            system=this_system(),
            pid=pid,
            start=start_of(pid),
            ended=ended,
            code=self.code,
            processes=tuple(entries),
        )
        (self.folder / "launcher.127.0.0.1.1.json").write_bytes(msgspec.json.encode(record))

    def _names(self) -> list[tuple[str, int]]:
        servers = [(f"server {index}", 2000 + index) for index in range(self.servers)]
        return [*servers, *((f"worker {one.index}", one.pid) for one in self.workers)]
