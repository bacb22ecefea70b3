# SPDX-License-Identifier: Apache-2.0
"""`MetricRecorder`: appends the snapshots and events of a process to files, in a thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fleetlight.files.atomic import replace_file
from fleetlight.observe.log import logger
from fleetlight.observe.telemetry.registry import Registry
from fleetlight.observe.telemetry.snapshot import (
    EVENTS_PREFIX,
    FOLDER,
    SUFFIX,
    Event,
    line_of,
    snapshot_file,
)

EVERY_S = 1.0
#: the size at which older lines of a file are thinned out
MAX_BYTES = 4 << 20


class MetricRecorder:
    """Records one process; a disk that is full costs metrics only."""

    def __init__(
        self,
        log_dir: Path,
        kind: str,
        index: int,
        registry: Registry,
        every_s: float = EVERY_S,
        each_time: Callable[[], None] = lambda: None,
    ) -> None:
        """`each_time` is called after each snapshot."""
        self._registry, self._every_s, self._each_time = registry, every_s, each_time
        folder = log_dir / FOLDER
        self._snapshots = ThinnedFile(folder / snapshot_file(kind, index))
        self._events = ThinnedFile(folder / f"{EVENTS_PREFIX}{kind}.{index}{SUFFIX}")
        self._over = threading.Event()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        #: the kinds of errors that were logged
        self._warned: set[type[Exception]] = set()
        self._thread = threading.Thread(target=self._run, name="fleet-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Record the last metrics, and end."""
        if not self._over.is_set() and os.getpid() == self._pid:
            self._over.set()
            with self._lock:
                self._guarded(self._append)

    def record(self) -> None:
        """Append a snapshot, and the events since the last one; nothing after the last metrics."""
        with self._lock:
            if not self._over.is_set():
                self._append()

    def _append(self) -> None:
        # events first: they are taken once, and a snapshot may fail
        for event in self._registry.take_events():
            self._events.append(msgspec.json.encode(event))
        self._snapshots.append(line_of(self._registry.snapshot()))

    def _run(self) -> None:
        while not self._over.is_set():
            self._guarded(self.record)
            self._guarded(self._each_time)
            self._over.wait(self._every_s)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Training continues without metrics, and metrics without what fails."""
        try:
            act()
        except Exception as error:
            # each second has the next one, with another text perhaps
            if type(error) not in self._warned:
                self._warned.add(type(error))
                name = type(error).__name__
                logger.warning("metrics of this process are incomplete: %s: %s", name, error)


class ThinnedFile:
    """An append-only file.

    When it grows too large, every other line of its older three quarters is dropped.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._has_warned = False

    def append(self, line: bytes) -> None:
        """Append a line."""
        try:
            self._path.parent.mkdir(exist_ok=True)
            descriptor = os.open(
                self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
            try:
                os.write(descriptor, line + b"\n")
                size = os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
            if size > self._max_bytes:
                self._thin()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("metrics are not recorded in %s: %s", self._path, error)

    def _thin(self) -> None:
        lines = self._path.read_bytes().splitlines(keepends=True)
        recent = len(lines) * 3 // 4
        kept = [*lines[:recent:2], *lines[recent:]]
        replace_file(self._path, b"".join(kept), unique=True, durable=False)


class EventFile:
    """The events of one launcher."""

    def __init__(
        self,
        log_dir: Path,
        name: str,
        who: str,
        host: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`name` distinguishes the files of several launchers."""
        self._file = ThinnedFile(log_dir / FOLDER / f"{EVENTS_PREFIX}{name}{SUFFIX}")
        self._who, self._host, self._clock = who, host, clock

    def add(
        self,
        kind: str,
        text: str,
        who: str | None = None,
        *,
        pid: int | None = None,
        status: int | None = None,
        restart: int = 0,
    ) -> None:
        """Append an event of this launcher, or of a process that it has started."""
        event = Event(
            self._clock(),
            self._who if who is None else who,
            kind,
            text,
            host=self._host,
            pid=pid,
            status=status,
            restart=restart,
        )
        self._file.append(msgspec.json.encode(event))
