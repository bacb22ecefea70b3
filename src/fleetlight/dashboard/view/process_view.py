# SPDX-License-Identifier: Apache-2.0
"""`ProcessView`: what the page says of one process, from its metrics. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from fleetlight.dashboard.view.facts import ProcessFacts, ProcessReading, ProcessState
from fleetlight.dashboard.view.timeline import Timeline
from fleetlight.observe.telemetry.catalogue import METRICS, STEP_PARTS, step_metric
from fleetlight.observe.telemetry.history import Series, count_keys
from fleetlight.observe.telemetry.snapshot import split_key

#: the time over which current rates are averaged
WINDOW_S = 10.0
#: a running process without a snapshot for this long is silent
SILENT_S = 5.0
#: a process has its first snapshot after it has found all others, for which this is the usual limit
STARTING_S = 300.0
_PARTS = [step_metric(part) for part in STEP_PARTS]
#: parts in which a worker is not busy itself
WAITING = ("wait", "push")
#: metrics that are shown as they are, and their names on the page
_NEWEST = {
    "skipped_steps": "skipped",
    "queued_pushes": "queued",
    "reconnects": "reconnects",
    "resident_bytes": "memory",
    "gpu_bytes": "gpu",
    "journal_bytes": "journal",
    "snapshot_age_seconds": "snapshot_age",
    "local_rows": "local_rows",
}
#: metrics of which the growth in a second is shown
_RATES = {
    "samples": "rate",
    "steps": "pace",
    "cpu_seconds": "cores",
    "sent_bytes": "sent",
    "received_bytes": "received",
    "host_sent_bytes": "host_sent",
    "applied_pushes": "applied",
}
#: metrics of which a share is shown: its name, what counts, and what makes up the rest
_SHARES = (
    ("hit", "rows_read_ahead", "rows_on_demand"),
    ("cached", "cached_rows_found", "cached_rows_copied"),
)


class ProcessView:
    """Follows the metrics of one process."""

    def __init__(self, name: str) -> None:
        #: `worker.1`, as in the names of files
        self.name = name
        self.kind, _, index = name.partition(".")
        self.index = int(index) if index.isdigit() else 0
        self._series = Series()
        #: the newest moment that the timeline has
        self._consumed = -math.inf
        #: when the number of steps last grew
        self._stepped: float | None = None
        #: the metrics with labels that have lines: key, name and label
        self._labelled: list[tuple[str, str, str]] = []
        self._known_columns = 0

    @property
    def title(self) -> str:
        """`worker 1`."""
        return f"{self.kind} {self.index}"

    def is_ahead_of(self, series: Series) -> bool:
        """True if the clock of its host was set back."""
        return bool(series.times) and series.times[-1] < self._consumed

    def restart(self) -> None:
        """The next call of `follow` adds all moments."""
        self._consumed, self._stepped, self._known_columns = -math.inf, None, 0

    def follow(self, series: Series, timeline: Timeline) -> None:
        """Add the moments that are new to the timeline."""
        self._series = series
        times = series.times
        for i in range(bisect_right(times, self._consumed), len(times)):
            self._add(i, timeline)
            self._consumed = times[i]

    def _add(self, i: int, timeline: Timeline) -> None:
        at = self._series.times[i]
        self._put_newest(i, at, timeline)
        if i == 0 or self._series.pids[i] != self._series.pids[i - 1]:
            self._stepped = None
            return
        before = self._series.times[i - 1]
        steps = self._series.grown("steps", i - 1, i)
        if steps > 0:
            # the first step includes the start of the process
            if self._stepped is not None:
                since = self._stepped
                timeline.spread(f"step:{self.name}", since, at, at - since, steps)
            self._stepped = at
        if "steps" in self._series.columns:
            waited = self._series.grown(step_metric("wait"), i - 1, i)
            timeline.spread(f"wait:{self.name}", before, at, waited, at - before)
            samples = self._series.grown("samples", i - 1, i)
            timeline.spread(f"rate:{self.name}", before, at, samples, at - before)
            timeline.spread(f"pace:{self.name}", before, at, steps, at - before)
        late, number = count_keys("staleness")
        if (pushes := self._series.grown(number, i - 1, i)) > 0:
            timeline.spread("staleness", before, at, self._series.grown(late, i - 1, i), pushes)
        moved = sum(self._series.grown(key, i - 1, i) for key in ("sent_bytes", "received_bytes"))
        timeline.spread(f"bytes:{self.name}", before, at, moved, at - before)

    def _put_newest(self, i: int, at: float, timeline: Timeline) -> None:
        columns = self._series.columns
        if len(columns) != self._known_columns:
            self._known_columns = len(columns)
            found = ((key, *split_key(key)) for key in columns)
            self._labelled = [one for one in found if one[1] in ("logged", "table_rows")]
        for key, metric, label in self._labelled:
            value = columns[key][i]
            if math.isnan(value):
                continue
            if metric == "logged":
                # an infinity makes a gap: the mean of the others would hide it
                timeline.spread(f"logged:{label}", at, at, value, 1.0)
            else:
                timeline.put(f"rows:{label}:{self.name}", at, value)

    def row(self, facts: ProcessFacts, now: float) -> dict[str, Any]:
        """The process at this moment."""
        series = self._series
        seen = series.times[-1] if series.times else None
        is_new = self._is_new(facts)
        row: dict[str, Any] = {
            "name": self.title,
            "kind": self.kind,
            "index": self.index,
            "host": facts.host,
            "pid": facts.pid or (series.pids[-1] if series.pids else 0),
            "state": self._state(facts, now),
            "detail": facts.detail,
            "restarts": facts.restarts,
            "seen": seen,
            "stepped": None if is_new else self._stepped,
            "step": None if is_new else series.last("steps"),
        }
        if is_new:
            return row
        for key, name in _NEWEST.items():
            if (value := series.last(key)) is not None:
                row[name] = value
        if row["state"] == "running":
            row |= {**self._current(WINDOW_S), **self._newest_part()}
        elif row["state"] == "ended":
            row |= self._current(math.inf)
        return row

    def reading(self, facts: ProcessFacts, now: float) -> ProcessReading:
        """The newest metrics as they were counted."""
        series = self._series
        return ProcessReading(
            kind=self.kind,
            index=self.index,
            is_up=self._state(facts, now) == "running",
            restarts=facts.restarts,
            values={
                key: value for key, value in series.newest.items() if split_key(key)[0] in METRICS
            },
            counts=series.counts,
        )

    def _is_new(self, facts: ProcessFacts) -> bool:
        """Whether the process that runs now has no snapshot yet."""
        series = self._series
        if not series.times:
            return True
        is_same = not facts.pid or series.pids[-1] == facts.pid
        if is_same or facts.state is not ProcessState.RUNNING:
            return False
        # a script may train in a process of its own, whose id no launcher has
        return facts.started is None or series.times[-1] < facts.started

    def _state(self, facts: ProcessFacts, now: float) -> str:
        if facts.state in (ProcessState.ENDED, ProcessState.FAILED):
            return str(facts.state.value)
        seen = self._series.times[-1] if self._series.times else None
        if self._is_new(facts):
            if facts.state is ProcessState.UNKNOWN:
                return "unknown"
            since = seen if facts.started is None else facts.started
            return "silent" if since is not None and now - since > STARTING_S else "starting"
        return "silent" if seen is not None and now - seen > SILENT_S else "running"

    def _current(self, window_s: float) -> dict[str, Any]:
        """Rates, and the parts of a step, over a time."""
        first, last = self._series.window(window_s)
        seconds = self._series.times[last] - self._series.times[first]
        if seconds <= 0:
            return {}
        found: dict[str, Any] = {
            name: self._series.rate(key, window_s) for key, name in _RATES.items()
        }
        for name, part, others in _SHARES:
            found[name] = _share(
                self._series.grown(part, first, last), self._series.grown(others, first, last)
            )
        steps = self._series.grown("steps", first, last)
        parts = [self._series.grown(key, first, last) for key in _PARTS]
        if steps and sum(parts):
            found["step_s"] = seconds / steps
            found["parts"] = [part / steps for part in parts]
        return {name: value for name, value in found.items() if value is not None}

    def _newest_part(self) -> dict[str, str]:
        """The part of a step that took most time lately."""
        first, last = self._series.window(SILENT_S / 2)
        newest = [self._series.grown(key, first, last) for key in _PARTS]
        return {"part": STEP_PARTS[newest.index(max(newest))]} if sum(newest) else {}

    def growth(self, key: str, seconds: float) -> float:
        """How much a metric grows in a second, over the last `seconds`."""
        return self._series.rate(key, seconds) or 0.0

    def newest(self, metric: str) -> Mapping[str, float]:
        """The newest values of a metric by label."""
        found = {}
        for key in self._series.columns:
            name, label = split_key(key)
            if name == metric and (value := self._series.last(key)) is not None:
                found[label] = value
        return found

    @property
    def logged(self) -> Mapping[str, float]:
        """The newest values of `fleet.log` by name; some may be NaN or infinite."""
        found = ((split_key(key), value) for key, value in self._series.newest.items())
        return {label: value for (name, label), value in found if name == "logged"}

    @property
    def counts(self) -> Mapping[str, Mapping[int, int]]:
        """How often each number occurred."""
        return self._series.counts


def _share(part: float, others: float) -> float | None:
    return part / (part + others) if part + others else None
