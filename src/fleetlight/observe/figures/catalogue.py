# SPDX-License-Identifier: Apache-2.0
"""The catalogue of figures: every name, its kind, its unit and what it says. Pure.

Names follow Prometheus: base units, and the unit at the end. Exporters add the prefix
`fleetlight_`, and `_total` to counters.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class FigureKind(enum.Enum):
    """How a figure changes."""

    #: only grows while a process runs
    COUNTER = "counter"
    #: goes up and down
    GAUGE = "gauge"
    #: how often each whole number occurred; only grows
    COUNTS = "counts"


class Figure(NamedTuple):
    """One figure of the catalogue."""

    name: str
    kind: FigureKind
    #: what is counted: "s", "bytes", "rows" ...
    unit: str
    help: str
    #: what distinguishes several values of one process; "" if it has one
    label: str = ""
    #: how a line of a log says it; "": its name
    words: str = ""

    def sentence(self, value: float) -> str:
        """The figure in a line of a log."""
        said = self.words or self.name.replace("_", " ")
        return f"{said} {value:.1f} s" if self.unit == "s" else f"{said} {value:,.0f}"


_COUNTER, _GAUGE, _COUNTS = FigureKind.COUNTER, FigureKind.GAUGE, FigureKind.COUNTS

#: the parts of a step's time, in the order in which they are shown
STEP_PARTS = ("data", "forward", "pull", "backward", "wait", "push", "optimizer", "other")

_STEP_HELP = {
    "data": "the loader makes the next batch",
    "forward": "forward of the model, without pulls",
    "pull": "rows and dense values arrive from servers",
    "backward": "backward, without waits",
    "wait": "for other workers, or for room in the queue of pushes",
    "push": "gradients are sent, and in sync mode applied with those of all workers",
    "optimizer": "the worker's own step",
    "other": "the script itself: the loss, metrics, logging",
}


def step_figure(part: str) -> str:
    """The name of the figure of a part of a step's time."""
    return f"step_{part}_seconds"


_FIGURES = (
    Figure("steps", _COUNTER, "steps", "optimizer steps of this worker"),
    Figure("samples", _COUNTER, "samples", "samples of the batches that loaders handed out"),
    *(Figure(step_figure(p), _COUNTER, "s", f"time of steps: {_STEP_HELP[p]}") for p in STEP_PARTS),
    Figure("logged", _GAUGE, "", "values of fleet.log, the mean since the last snapshot", "name"),
    Figure("skipped_steps", _COUNTER, "steps", "steps dropped for an infinite or NaN gradient"),
    Figure("pushes", _COUNTER, "pushes", "pushes of this worker that have a reply"),
    Figure("applied_pushes", _COUNTER, "pushes", "pushes that this server has applied"),
    Figure("queued_pushes", _GAUGE, "pushes", "pushes in flight or in the queue of this worker"),
    Figure(
        "push_wait_seconds", _COUNTER, "s", "time in which a push waited for room", words="waited"
    ),
    Figure("merged_pushes", _COUNTER, "pushes", "pushes that went with another", words="merged"),
    Figure(
        "longest_push_queue", _GAUGE, "pushes", "most pushes in the queue", words="longest queue"
    ),
    Figure("exchanges", _COUNTER, "exchanges", "GeoSGD: differences exchanged with the servers"),
    Figure("local_rows", _GAUGE, "rows", "GeoSGD: rows that this worker keeps", words="rows here"),
    Figure(
        "rows_read_ahead",
        _COUNTER,
        "rows",
        "rows that arrived before their batch",
        words="prefetched rows",
    ),
    Figure(
        "rows_on_demand",
        _COUNTER,
        "rows",
        "rows of announced batches, fetched when needed",
        words="rows fetched on demand",
    ),
    Figure(
        "read_ahead_wait_seconds",
        _COUNTER,
        "s",
        "waits for rows that were on their way",
        words="waited for prefetched rows",
    ),
    Figure(
        "cached_rows_found",
        _COUNTER,
        "rows",
        "rows that lookups found on the device",
        words="rows found on the device",
    ),
    Figure(
        "cached_rows_copied",
        _COUNTER,
        "rows",
        "rows that were copied to the device",
        words="rows copied to it",
    ),
    Figure("sent_bytes", _COUNTER, "bytes", "bytes sent over connections to servers"),
    Figure("received_bytes", _COUNTER, "bytes", "bytes received over connections from servers"),
    Figure("host_sent_bytes", _COUNTER, "bytes", "bytes that left this host, from any process"),
    Figure("reconnects", _COUNTER, "connections", "connections to servers that were made again"),
    Figure("staleness", _COUNTS, "pushes", "pushes applied between the pull and the push of rows"),
    Figure("table_rows", _GAUGE, "rows", "rows of a table on this server", "table"),
    Figure("table_bytes", _GAUGE, "bytes", "memory of a table on this server", "table"),
    Figure("journal_bytes", _GAUGE, "bytes", "files of the journal since the last snapshot"),
    Figure("snapshot_age_seconds", _GAUGE, "s", "age of the newest snapshot of this server"),
    Figure("checkpoint_time_seconds", _GAUGE, "s", "when the last checkpoint was complete (Unix)"),
    Figure("publication_time_seconds", _GAUGE, "s", "when the last publication was made (Unix)"),
    Figure("cpu_seconds", _COUNTER, "s", "CPU time of this process"),
    Figure("resident_bytes", _GAUGE, "bytes", "memory of this process"),
    Figure("gpu_bytes", _GAUGE, "bytes", "memory of tensors on this worker's GPU"),
    Figure("dropped_values", _COUNTER, "values", "logged values whose names were over the limit"),
    Figure("dropped_labels", _COUNTER, "labels", "labels that were over the limit of a figure"),
)

#: all figures, by name
FIGURES = {figure.name: figure for figure in _FIGURES}
