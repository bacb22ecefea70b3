# SPDX-License-Identifier: Apache-2.0
"""`JobView`: the whole content of the page, and what is new since a client last read it. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from fleetlight.dashboard.view.facts import (
    LogFolderFacts,
    ProcessFacts,
    ProcessReading,
    ProcessState,
    how_ended,
)
from fleetlight.dashboard.view.process_view import WAITING, ProcessView
from fleetlight.dashboard.view.timeline import Timeline
from fleetlight.observe.telemetry.catalogue import STEP_PARTS
from fleetlight.observe.telemetry.history import History
from fleetlight.observe.telemetry.process_events import ProcessEvents
from fleetlight.observe.telemetry.snapshot import Event, labelled

#: how much slower than the others a worker must be
_SLOWER = 1.25
_BUSY = [i for i, part in enumerate(STEP_PARTS) if part not in WAITING]


def straggler(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The slowest of running workers; None if none is clearly slower than the others.

    Workers that wait for each other take the same time for a step. The slow one waits least, so
    the time in which workers are busy decides. Where workers do not wait, a push may be slow, too.
    """
    found = [row for row in rows if row["kind"] == "worker" and "parts" in row]
    if len(found) < 2:
        return None
    return _slowest(found, range(len(STEP_PARTS))) or _slowest(found, _BUSY)


def _slowest(rows: Sequence[Mapping[str, Any]], parts: Sequence[int]) -> dict[str, Any] | None:
    times = [sum(row["parts"][i] for i in parts) for row in rows]
    slowest = max(range(len(rows)), key=times.__getitem__)
    others = [i for i in range(len(rows)) if i != slowest]
    usual = median(times[i] for i in others)
    if times[slowest] < _SLOWER * usual:
        return None
    typical = {i: median(rows[j]["parts"][i] for j in others) for i in parts}
    own = rows[slowest]["parts"]
    part = max(parts, key=lambda i: own[i] - typical[i])
    return {
        "name": rows[slowest]["name"],
        "times": times[slowest] / usual if usual else None,
        "part": STEP_PARTS[part],
        "seconds": own[part],
        "others": typical[part],
        #: True: the others are as slow, since they wait for it
        "holds": len(parts) < len(STEP_PARTS),
    }


#: the time over which growth is measured
_WINDOW_S = 60.0
#: tables on the page
_MAX_TABLES = 64
#: memory that grows more slowly lasts for years
_MIN_GROWTH = 1024.0


def tables(servers: Sequence[ProcessView]) -> list[dict[str, Any]]:
    """Each table over all servers, the largest first."""
    rows: Counter[str] = Counter()
    growth: dict[str, float] = {}
    sizes: dict[str, dict[str, float]] = {}
    for server in servers:
        for name, count in server.newest("table_rows").items():
            rows[name] += int(count)
            speed = server.growth(labelled("table_rows", name), _WINDOW_S)
            growth[name] = growth.get(name, 0.0) + speed
        for name, size in server.newest("table_bytes").items():
            sizes.setdefault(name, {})[server.title] = size
    found = [_table(name, rows[name], growth[name], sizes.get(name, {})) for name in rows]
    return sorted(found, key=lambda table: -table["bytes"])[:_MAX_TABLES]


def _table(name: str, rows: int, growth: float, sizes: Mapping[str, float]) -> dict[str, Any]:
    total = sum(sizes.values())
    return {
        "name": name,
        "rows": rows,
        "growth": growth * 60,
        "bytes": total,
        "servers": sizes,
        # 1: each server has the same share
        "balance": max(sizes.values()) * len(sizes) / total if total else None,
    }


def memory(
    servers: Sequence[ProcessView], hosts: Mapping[str, str], free: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Free memory of the servers' hosts, and how long it lasts while tables grow as now."""
    growth: dict[str, float] = {}
    for server in servers:
        host = hosts.get(server.title, "")
        if host in free:
            growth[host] = growth.get(host, 0.0) + sum(
                server.growth(labelled("table_bytes", name), _WINDOW_S)
                for name in server.newest("table_bytes")
            )
    return [
        {
            "host": host,
            "free": free[host],
            "growth": speed,
            "hours": free[host] / speed / 3600 if speed > _MIN_GROWTH else None,
        }
        for host, speed in growth.items()
    ]


def completed(facts: LogFolderFacts, events: ProcessEvents) -> Mapping[str, ProcessFacts]:
    """The processes: records decide, events say what no record does."""
    names = dict.fromkeys([*facts.processes, *events.names])
    return {name: _completed(name, facts, events) for name in names}


def _completed(name: str, facts: LogFolderFacts, events: ProcessEvents) -> ProcessFacts:
    found = facts.processes.get(name, ProcessFacts(name=name))
    start = events.start(name, found.host)
    if found.state is not ProcessState.UNKNOWN:
        is_same = start is not None and start.pid == found.pid
        return dataclasses.replace(found, started=start.at) if start and is_same else found
    if start is not None:
        found = _event_facts(found, start, events.status(name, found.host))
    if facts.is_over and found.state is not ProcessState.FAILED:
        return dataclasses.replace(found, state=ProcessState.ENDED)
    return found


def _event_facts(found: ProcessFacts, start: Event, status: int | None) -> ProcessFacts:
    state, detail = ProcessState.RUNNING, ""
    if status is not None:
        state = ProcessState.FAILED if status else ProcessState.ENDED
        detail = how_ended(status)
    return dataclasses.replace(
        found,
        host=found.host or start.host,
        pid=start.pid or 0,
        state=state,
        detail=detail,
        restarts=start.restart,
        started=start.at,
    )


#: the last moments of a running job, in which some processes have not recorded yet
_INCOMPLETE_S = 1.2
#: bins that may have changed although a client has them
_MAY_CHANGE = 3
_MAX_EVENTS = 500
#: charts of logged values
_MAX_LOGGED = 32
#: bars of the histogram of staleness; the last has all larger numbers
_BARS = 24


class Cursor(NamedTuple):
    """What a client has."""

    #: another one needs everything
    generation: int
    bins: int
    events: int


class JobView:
    """Follows a job; metrics and facts come from its caller."""

    def __init__(self) -> None:
        self._processes: dict[str, ProcessView] = {}
        self._timeline = Timeline()
        self._known_events: set[Event] = set()
        #: the newest, in the order in which they were found
        self._events: list[Event] = []
        #: how many there have been
        self._event_count = 0
        self._logged: set[str] = set()
        self._tables: set[str] = set()
        self._facts = LogFolderFacts()
        self._launcher_events = ProcessEvents()
        #: the facts of each process, by name
        self._known: Mapping[str, ProcessFacts] = {}
        self._description: Mapping[str, Any] = {}
        self._rows: list[dict[str, Any]] = []
        self._now = 0.0
        self._generation = 0

    def update(self, history: History, facts: LogFolderFacts, now: float) -> None:
        """Take in what is new."""
        self._facts, self._now = facts, now
        if any(
            process.is_ahead_of(history.series[name])
            for name, process in self._processes.items()
            if name in history.series
        ):
            self._restart_timeline()
        if self._timeline.start is None:
            starts = [series.times[0] for series in history.series.values() if series.times]
            self._timeline.start = math.floor(min(starts)) if starts else None
        for name, series in history.series.items():
            process = self._processes.setdefault(name, ProcessView(name))
            process.follow(series, self._timeline)
        self._add_events(history.events)
        self._known = completed(facts, self._launcher_events)
        for name in self._known:
            key = name.replace(" ", ".")
            self._processes.setdefault(key, ProcessView(key))
        self._rows = [
            process.row(self._facts_of(process), now)
            for process in sorted(self._processes.values(), key=_order)
        ]
        for process in self._processes.values():
            self._logged |= process.logged.keys()
            self._tables |= process.newest("table_rows").keys()
        if facts.description != self._description:
            # clients get it only with everything else
            self._description = facts.description
            self._generation += 1

    def _restart_timeline(self) -> None:
        """Let clients forget all lines: a clock was set back, so they have moments to come."""
        self._generation += self._timeline.generation + 1
        self._timeline = Timeline()
        for process in self._processes.values():
            process.restart()

    def _add_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if event not in self._known_events:
                self._known_events.add(event)
                self._events.append(event)
                self._launcher_events.add(event)
                self._event_count += 1
        del self._events[:-_MAX_EVENTS]
        if len(self._known_events) > 4 * len(events) + _MAX_EVENTS:
            self._known_events = set(events)

    def readings(self, now: float) -> list[ProcessReading]:
        """The newest metrics of each process."""
        return [
            process.reading(self._facts_of(process), now)
            for process in sorted(self._processes.values(), key=_order)
        ]

    def _facts_of(self, process: ProcessView) -> ProcessFacts:
        over = ProcessState.ENDED if self._facts.is_over else ProcessState.UNKNOWN
        return self._known.get(process.title, ProcessFacts(name=process.title, state=over))

    @property
    def facts(self) -> LogFolderFacts:
        """The newest facts."""
        return self._facts

    @property
    def cursor(self) -> Cursor:
        """Where a client is that has everything."""
        return Cursor(
            self._generation + self._timeline.generation, self._complete_bins(), self._event_count
        )

    def whole(self) -> dict[str, Any]:
        """Everything."""
        return {
            "parts": STEP_PARTS,
            "description": self._description,
            **self._state(),
            "lines": self._lines(0),
            "events": [_event(event) for event in self._events],
        }

    def news(self, cursor: Cursor) -> dict[str, Any] | None:
        """What a client with a cursor lacks; None: it needs everything."""
        now = self.cursor
        if cursor.generation != now.generation or cursor.bins > now.bins:
            return None
        count = now.events - cursor.events
        if count > len(self._events):
            return None
        return {
            **self._state(),
            "lines": self._lines(max(0, cursor.bins - _MAY_CHANGE)),
            "events": [_event(event) for event in self._events[len(self._events) - count :]],
        }

    def _state(self) -> dict[str, Any]:
        """All that has no history."""
        facts, rows = self._facts, self._rows
        servers = [process for process in self._processes.values() if process.kind == "server"]
        hosts = {name: one.host for name, one in self._known.items()}
        return {
            "now": self._now,
            "job": facts.job,
            "folder": facts.folder,
            "over": facts.is_over,
            "code": facts.code,
            "processes": [{key: _short(value) for key, value in row.items()} for row in rows],
            "straggler": _rounded(straggler(rows)),
            "tables": _rounded(tables(servers)),
            "memory": _rounded(memory(servers, hosts, facts.free_bytes)),
            "staleness": self._staleness(servers),
            "not_finite": self._not_finite(),
            "hit": _mean(row["hit"] for row in rows if "hit" in row),
            "skipped": sum(row.get("skipped", 0) for row in rows),
            "checkpoint": self._latest("checkpoint_time_seconds"),
            "publication": self._latest("publication_time_seconds"),
        }

    def _staleness(self, servers: Sequence[ProcessView]) -> dict[str, Any]:
        counts: Counter[int] = Counter()
        for server in servers:
            counts.update(server.counts.get("staleness", {}))
        if not counts.total():
            return {"bars": [], "mean": None}
        bars = [0] * (min(max(counts), _BARS - 1) + 1)
        for number, times in counts.items():
            bars[min(number, _BARS - 1)] += times
        mean = sum(number * times for number, times in counts.items()) / counts.total()
        return {"bars": bars, "mean": _short(mean), "most": max(counts)}

    def _not_finite(self) -> list[str]:
        """The logged values that are NaN or infinite now, on any worker."""
        found = {
            name
            for process in self._processes.values()
            for name, value in process.logged.items()
            if not math.isfinite(value)
        }
        return sorted(found)[:_MAX_LOGGED]

    def _latest(self, metric: str) -> float | None:
        moments = [
            value
            for process in self._processes.values()
            for value in process.newest(metric).values()
        ]
        return max(moments, default=None)

    def _lines(self, first: int) -> dict[str, Any]:
        """The lines of all charts from a bin on."""
        line, end = self._timeline.line, self._complete_bins()
        workers = [name for name, one in self._processes.items() if one.kind == "worker"]
        servers = [name for name, one in self._processes.items() if one.kind == "server"]
        found: dict[str, Any] = {
            "first": first,
            "times": self._timeline.times(first),
            "rate": _sums([line(f"rate:{name}", first) for name in workers]),
            "pace": _sums([line(f"pace:{name}", first) for name in workers]),
            "bytes": _sums([line(f"bytes:{name}", first) for name in workers]),
            "staleness": line("staleness", first),
            "step": {name: line(f"step:{name}", first) for name in workers},
            "wait": {name: line(f"wait:{name}", first) for name in workers},
            "rows": {
                table: _sums([self._continued(f"rows:{table}:{name}", first) for name in servers])
                for table in sorted(self._tables)[:_MAX_LOGGED]
            },
            "logged": {
                name: self._continued(f"logged:{name}", first, _MAY_CHANGE)
                for name in sorted(self._logged)[:_MAX_LOGGED]
            },
        }
        count = max(0, end - first)
        # a chart shows three digits of the many lines of workers
        digits = dict.fromkeys(("step", "wait"), 3)
        return {
            key: _cut(value, count, digits.get(key, 4)) if key != "first" else value
            for key, value in found.items()
        }

    def _continued(self, key: str, first: int, most: int | None = None) -> list[float]:
        """A line in which a bin without a snapshot, or `most` of them, has the value before it."""
        begin = max(0, first - _MAY_CHANGE)
        return _filled(self._timeline.line(key, begin), most)[first - begin :]

    def _complete_bins(self) -> int:
        start, width = self._timeline.start, self._timeline.width
        if start is None:
            return 0
        if self._facts.is_over:
            return self._timeline.bins
        complete = math.floor((self._now - _INCOMPLETE_S - start) / width)
        return max(0, min(self._timeline.bins, complete))


def _order(process: ProcessView) -> tuple[str, int]:
    return process.kind, process.index


def _event(event: Event) -> dict[str, Any]:
    return {"at": event.at, "who": event.who, "kind": event.kind, "text": event.text}


def _sums(lines: Sequence[Sequence[float]]) -> list[float]:
    """The sum of lines, where at least one has a value."""
    return [_sum(values) for values in zip(*lines, strict=True)]


def _sum(values: Sequence[float]) -> float:
    # a NaN is unequal to itself
    known = [value for value in values if value == value]
    return math.fsum(known) if known else math.nan


def _filled(line: list[float], most: int | None) -> list[float]:
    """A line whose gaps have the value before them, at most for `most` places."""
    before, gap = math.nan, 0
    for place, value in enumerate(line):
        if value == value:
            before, gap = value, 0
        else:
            gap += 1
            line[place] = before if most is None or gap <= most else math.nan
    return line


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return _short(fmean(found)) if found else None


def _cut(value: Any, count: int, digits: int) -> Any:
    if isinstance(value, dict):
        return {key: _cut(line, count, digits) for key, line in value.items()}
    return [_short(number, digits) for number in value[:count]]


def _rounded(value: Any) -> Any:
    """A structure with all numbers in few digits."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return _short(value)


def _short(value: Any, digits: int = 4) -> Any:
    """A number in few digits: more would only make messages longer. Moments stay whole."""
    if isinstance(value, list):
        return [_short(one) for one in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    if abs(value) >= 1000:
        return round(value, 1) if abs(value) > 1e9 else round(value)
    return float(f"{value:.{digits}g}")
