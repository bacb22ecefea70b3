# SPDX-License-Identifier: Apache-2.0
"""`History`: the metrics and events of all processes of a job, read from its log folder.

The files may grow, be thinned out or be replaced while they are read.
"""

from __future__ import annotations

import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from pathlib import Path

from fleetlight.observe.telemetry.snapshot import (
    EVENTS_PREFIX,
    FOLDER,
    SUFFIX,
    Event,
    Snapshot,
    events_in,
    snapshots_in,
)

#: the moments of a process that are kept; older ones are thinned out
MAX_MOMENTS = 3600
_MAX_EVENTS = 5000
_NO_VALUE = float("nan")


def count_keys(key: str) -> tuple[str, str]:
    """The columns of a metric of counts: the sum of all numbers, and how many there were."""
    return f"{key}:sum", f"{key}:count"


class Series:
    """The metrics of one process over time, as columns."""

    def __init__(self, most: int = MAX_MOMENTS) -> None:
        self._most = most
        self.times = array("d")
        self.pids = array("q")
        #: the process of the last snapshot, if that was older and is left out
        self._behind = 0
        #: NaN where a snapshot has no value, and infinity where its value is not finite
        self.columns: dict[str, array[float]] = {}
        #: the values of the newest snapshot as they are, and its counts of whole numbers
        self.newest: Mapping[str, float] = {}
        self.counts: dict[str, dict[int, int]] = {}

    def add(self, snapshot: Snapshot) -> None:
        """Append a snapshot; if the clock was set back, it replaces all."""
        if self.times and snapshot.at < self.times[-1]:
            if snapshot.pid not in (self.pids[-1], self._behind):
                # perhaps the last one of a process that was replaced
                self._behind = snapshot.pid
                return
            del self.times[:], self.pids[:]
            self.columns.clear()
        self._behind = 0
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
        self.newest, self.counts = snapshot.values, snapshot.counts
        if len(self.times) > self._most:
            self._thin()

    def _thin(self) -> None:
        half = len(self.times) // 2
        for name, column in self.columns.items():
            self.columns[name] = column[:half:2] + column[half:]
        self.times = self.times[:half:2] + self.times[half:]
        self.pids = self.pids[:half:2] + self.pids[half:]

    def last(self, key: str) -> float | None:
        """The newest value of a metric; None if the newest snapshot has no finite one."""
        column = self.columns.get(key)
        return column[-1] if column and math.isfinite(column[-1]) else None

    def window(self, span_s: float) -> tuple[int, int]:
        """The first and the last moment of the last seconds, in this start of the process.

        Where moments are further apart than that, the last two.
        """
        last = len(self.times) - 1
        first = max(0, min(bisect_left(self.times, self.times[last] - span_s), last - 1))
        # a restarted process counts from zero
        while self.pids[first] != self.pids[last]:
            first += 1
        return first, last

    def grown(self, key: str, first: int, last: int) -> float:
        """How much a counter grew between two moments of one start; 0 if it is missing."""
        column = self.columns.get(key)
        if column is None or not math.isfinite(column[last]):
            return 0.0
        # a counter may appear later than its process
        before = column[first] if math.isfinite(column[first]) else 0.0
        return max(0.0, column[last] - before)

    def rate(self, key: str, span_s: float) -> float | None:
        """How much a metric grew in a second of the last ones; None if that is not known."""
        column = self.columns.get(key)
        if not column or not math.isfinite(column[-1]):
            return None
        first, last = self.window(span_s)
        while not math.isfinite(column[first]):
            first += 1
        seconds = self.times[last] - self.times[first]
        return (column[last] - column[first]) / seconds if seconds > 0 else None


def _columns_of(snapshot: Snapshot) -> Iterator[tuple[str, float]]:
    for key, value in snapshot.values.items():
        yield key, value if math.isfinite(value) else math.inf
    for key, counts in snapshot.counts.items():
        total, number = count_keys(key)
        yield total, float(sum(value * times for value, times in counts.items()))
        yield number, float(sum(counts.values()))


class History:
    """Follows a log folder; `poll` reads what is new."""

    def __init__(self, log_dir: Path, most: int = MAX_MOMENTS) -> None:
        self._folder, self._most = log_dir / FOLDER, most
        self._event_files = EventFiles(log_dir)
        self._files: dict[str, LineFollower] = {}
        #: by file name without its suffix: `worker.0`
        self.series: dict[str, Series] = {}
        self.events: list[Event] = []

    def poll(self) -> bool:
        """Read what was appended; returns whether anything was."""
        has_new = self._poll_events()
        for name in _names_in(self._folder):
            if name.startswith(EVENTS_PREFIX):
                continue
            follower = self._files.setdefault(name, LineFollower(self._folder / name))
            data = follower.read()
            if not data:
                continue
            has_new = True
            series = self.series.setdefault(name.removesuffix(SUFFIX), Series(self._most))
            newest = series.times[-1] if follower.has_restarted and series.times else -math.inf
            for snapshot in snapshots_in(data):
                # all lines are read again: the older ones are known
                if snapshot.at > newest:
                    series.add(snapshot)
        return has_new

    def _poll_events(self) -> bool:
        new = self._event_files.poll()
        self.events += new
        self.events.sort(key=lambda event: event.at)
        del self.events[:-_MAX_EVENTS]
        return bool(new)


class EventFiles:
    """Follows the events of all processes and launchers in a log folder."""

    def __init__(self, log_dir: Path, of: str = "") -> None:
        """`of`: only events of these, such as `fleetrun`."""
        self._folder, self._prefix = log_dir / FOLDER, f"{EVENTS_PREFIX}{of}"
        self._files: dict[str, LineFollower] = {}
        #: by name of a file: the time of its newest event
        self._newest: dict[str, float] = {}

    def poll(self) -> list[Event]:
        """The events since the last call, in the order of their times."""
        new: list[Event] = []
        for name in _names_in(self._folder):
            if name.startswith(self._prefix):
                new += self._events_of(name)
        return sorted(new, key=lambda event: event.at)

    def _events_of(self, name: str) -> list[Event]:
        follower = self._files.setdefault(name, LineFollower(self._folder / name))
        events = list(events_in(follower.read()))
        newest = self._newest.get(name, -math.inf)
        if follower.has_restarted:
            # all lines are read again: the older ones are known
            events = [event for event in events if event.at > newest]
        self._newest[name] = max([newest, *(event.at for event in events)])
        return events


def _names_in(folder: Path) -> list[str]:
    """The files of snapshots and events."""
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
    except OSError:
        # it is not there yet, or a network file system does not reply now
        return []


class LineFollower:
    """Reads whole lines that are appended to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0
        #: the last line that was read, between its line breaks
        self._last = b""
        #: True if the file was replaced by one without that line: the last read has all lines
        self.has_restarted = False

    def read(self) -> bytes:
        """The lines since the last call, even if the file was thinned out meanwhile."""
        data, is_replaced = self._read()
        self.has_restarted = is_replaced
        if is_replaced and self._last:
            place = (b"\n" + data).rfind(self._last)
            self.has_restarted = place < 0
            data = data[place + len(self._last) - 1 :] if place >= 0 else data
        if data:
            self._last = b"\n" + data[data[:-1].rfind(b"\n") + 1 :]
        return data

    def _read(self) -> tuple[bytes, bool]:
        """The lines from the offset on, and whether that is the first since a replacement."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                is_replaced = bool(self._inode) and (
                    found.st_ino != self._inode or found.st_size < self._offset
                )
                if is_replaced or not self._inode:
                    self._inode, self._offset = found.st_ino, 0
                if found.st_size == self._offset:
                    return b"", is_replaced
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return b"", False
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end], is_replaced
