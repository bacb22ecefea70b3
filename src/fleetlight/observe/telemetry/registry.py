# SPDX-License-Identifier: Apache-2.0
"""`Registry`: the metrics of a process, collected for each snapshot.

A source is a function that returns metrics of the catalogue by name. Code that runs in every step
only adds to counters of its own.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from fleetlight.observe.log import logger
from fleetlight.observe.telemetry.catalogue import METRICS, MetricKind
from fleetlight.observe.telemetry.logged_values import LoggedValues
from fleetlight.observe.telemetry.snapshot import Event, Snapshot, split_key

#: a number, or for a metric of counts: how often each number occurred
Value = float | Mapping[int, int]
Source = Callable[[], Mapping[str, Value]]
#: how many labels a metric may have
MAX_LABELS = 256
#: events between two snapshots
_MAX_EVENTS = 1000


def usage() -> dict[str, float]:
    """CPU time and memory."""
    found = {"cpu_seconds": time.process_time(), "resident_bytes": float(_resident())}
    torch = sys.modules.get("torch")
    # without a context of its own, a process has nothing on the GPU
    if torch is not None and torch.cuda.is_initialized():
        found["gpu_bytes"] = float(torch.cuda.memory_allocated())
    return found


def _resident() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        # elsewhere the largest so far
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Registry:
    """The metrics of one process; its methods may be called by any thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sources: list[Source] = [usage]
        self._failed: set[int] = set()
        self._events: list[Event] = []
        #: by metric: when the last event of its kind was
        self._times: dict[str, float] = {}
        self.logged = LoggedValues()

    def add(self, source: Source) -> Callable[[], None]:
        """Ask a source in every snapshot; returns a function that ends this."""
        with self._lock:
            self._sources.append(source)

        def remove() -> None:
            with self._lock:
                if source in self._sources:
                    self._sources.remove(source)

        return remove

    def event(self, who: str, kind: str, text: str, step: int | None = None) -> None:
        """Note that something happened."""
        now, metric = self._clock(), f"{kind}_time_seconds"
        with self._lock:
            event = Event(now, who, kind, text, pid=os.getpid(), step=step)
            self._events = [*self._events[-_MAX_EVENTS:], event]
            if metric in METRICS:
                self._times[metric] = now

    def take_events(self) -> list[Event]:
        """The events since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def snapshot(self, *, takes: bool = True) -> Snapshot:
        """All metrics now; `takes`: the means of logged values restart."""
        values: dict[str, float] = {}
        counts: dict[str, dict[int, int]] = {}
        with self._lock:
            sources, times = list(self._sources), dict(self._times)
        for source in sources:
            for key, value in self._ask(source).items():
                kind = METRICS[split_key(key)[0]].kind
                if kind is MetricKind.COUNTS:
                    counts[key] = dict(value)
                else:
                    values[key] = float(value)
        values.update(times)
        values.update(self.logged.take() if takes else self.logged.now())
        _limit_labels(values)
        if self.logged.dropped:
            values["dropped_values"] = float(self.logged.dropped)
        return Snapshot(self._clock(), os.getpid(), values, counts)

    def _ask(self, source: Source) -> Mapping[str, Any]:
        try:
            return source()
        except Exception as error:
            # what a source reads may be closing
            if id(source) not in self._failed:
                self._failed.add(id(source))
                logger.debug("metrics of %s are missing: %s", source, error)
            return {}


def _limit_labels(values: dict[str, float]) -> None:
    """Keep the first labels of each metric, and count the others."""
    seen: dict[str, int] = {}
    dropped = []
    for key in values:
        name, label = split_key(key)
        if label:
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > MAX_LABELS:
                dropped.append(key)
    for key in dropped:
        del values[key]
    if dropped:
        values["dropped_labels"] = float(len(dropped))


#: the metrics of this process
registry = Registry()
