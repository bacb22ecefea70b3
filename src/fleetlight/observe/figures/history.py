# SPDX-License-Identifier: Apache-2.0
"""`History`: the figures and events of all processes of a job, read from its log folder.

The files may grow, be thinned out or be replaced while they are read.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterator
from pathlib import Path

from fleetlight.observe.figures.snapshot import (
    EVENTS_PREFIX,
    FOLDER,
    SUFFIX,
    Event,
    Snapshot,
    events_in,
    snapshots_in,
)

#: the moments of a process that are kept; older ones are thinned out
MOST_MOMENTS = 3600
_MOST_EVENTS = 5000
_NO_VALUE = float("nan")


def count_keys(key: str) -> tuple[str, str]:
    """The columns of a figure of counts: the sum of all numbers, and how many there were."""
    return f"{key}:sum", f"{key}:count"


class Series:
    """The figures of one process over time, as columns."""

    def __init__(self, most: int = MOST_MOMENTS) -> None:
        self._most = most
        self.times = array("d")
        self.pids = array("q")
        self.columns: dict[str, array[float]] = {}
        #: the newest counts of whole numbers
        self.counts: dict[str, dict[int, int]] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Append a snapshot; one that is not newer than the last is ignored."""
        if self.times and snapshot.at <= self.times[-1]:
            return
        before = len(self.times)
        self.times.append(snapshot.at)
        self.pids.append(snapshot.pid)
        for key, value in _columns_of(snapshot):
            column = self.columns.get(key)
            if column is None:
                column = self.columns[key] = array("d", [_NO_VALUE]) * before
            column.append(value)
        for column in self.columns.values():
            if len(column) == before:
                column.append(_NO_VALUE)
        self.counts = snapshot.counts
        if len(self.times) > self._most:
            self._thin()

    def _thin(self) -> None:
        half = len(self.times) // 2
        for name, column in self.columns.items():
            self.columns[name] = column[:half:2] + column[half:]
        self.times = self.times[:half:2] + self.times[half:]
        self.pids = self.pids[:half:2] + self.pids[half:]

    def last(self, key: str) -> float | None:
        """The newest value of a figure; None if the newest snapshot has none."""
        column = self.columns.get(key)
        return None if not column or math.isnan(column[-1]) else column[-1]


def _columns_of(snapshot: Snapshot) -> Iterator[tuple[str, float]]:
    yield from snapshot.values.items()
    for key, counts in snapshot.counts.items():
        total, number = count_keys(key)
        yield total, float(sum(value * times for value, times in counts.items()))
        yield number, float(sum(counts.values()))


class History:
    """Follows a log folder; `poll` reads what is new."""

    def __init__(self, log_dir: Path, most: int = MOST_MOMENTS) -> None:
        self._folder, self._most = log_dir / FOLDER, most
        self._files: dict[str, LineFollower] = {}
        #: by file name without its suffix: `worker.0`
        self.series: dict[str, Series] = {}
        self.events: list[Event] = []

    def poll(self) -> bool:
        """Read what was appended; returns whether anything was."""
        has_new = False
        for name in sorted(self._names()):
            follower = self._files.setdefault(name, LineFollower(self._folder / name))
            data = follower.read()
            if not data:
                continue
            has_new = True
            if name.startswith(EVENTS_PREFIX):
                known = set(self.events) if follower.has_restarted else ()
                self.events += [event for event in events_in(data) if event not in known]
                self.events.sort(key=lambda event: event.at)
                del self.events[:-_MOST_EVENTS]
            else:
                series = self.series.setdefault(name.removesuffix(SUFFIX), Series(self._most))
                for snapshot in snapshots_in(data):
                    series.add(snapshot)
        return has_new

    def _names(self) -> Iterator[str]:
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.endswith(SUFFIX):
                        yield entry.name
        except FileNotFoundError:
            return


class LineFollower:
    """Reads whole lines that are appended to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0
        #: True if the file was replaced, so that the last read has all its lines
        self.has_restarted = False

    def read(self) -> bytes:
        """The lines since the last call; all of them if the file was replaced."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                self.has_restarted = bool(self._inode) and (
                    found.st_ino != self._inode or found.st_size < self._offset
                )
                if self.has_restarted or not self._inode:
                    self._inode, self._offset = found.st_ino, 0
                if found.st_size == self._offset:
                    return b""
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return b""
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end]
