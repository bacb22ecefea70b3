# SPDX-License-Identifier: Apache-2.0
"""The catalogue of metrics: every name, its kind, its unit and what it says. Pure.

Names follow Prometheus: base units, and the unit at the end. Exporters add the prefix
`fleetlight_`, and `_total` to counters.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class MetricKind(enum.Enum):
    """How a metric changes."""

    #: only grows while a process runs
    COUNTER = "counter"
    #: goes up and down
    GAUGE = "gauge"
    #: how often each whole number occurred; only grows
    COUNTS = "counts"


class Metric(NamedTuple):
    """One metric of the catalogue."""

    name: str
    kind: MetricKind
    #: what is counted: "s", "bytes", "rows" ...
    unit: str
    help: str
    #: what distinguishes several values of one process; "" if it has one
    label: str = ""
    #: how a line of a log says it; "": its name
    words: str = ""

    def sentence(self, value: float) -> str:
        """The metric in a line of a log."""
        said = self.words or self.name.replace("_", " ")
        return f"{said} {value:.1f} s" if self.unit == "s" else f"{said} {value:,.0f}"


_COUNTER, _GAUGE, _COUNTS = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.COUNTS

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


def step_metric(part: str) -> str:
    """The name of the metric of a part of a step's time."""
    return f"step_{part}_seconds"


_METRICS = (
    Metric("steps", _COUNTER, "steps", "optimizer steps of this worker"),
    Metric("samples", _COUNTER, "samples", "samples of the batches that loaders handed out"),
    *(Metric(step_metric(p), _COUNTER, "s", f"time of steps: {_STEP_HELP[p]}") for p in STEP_PARTS),
    Metric("logged", _GAUGE, "", "values of fleet.log, the mean since the last snapshot", "name"),
    Metric("skipped_steps", _COUNTER, "steps", "steps dropped for an infinite or NaN gradient"),
    Metric("pushes", _COUNTER, "pushes", "pushes of this worker that have a reply"),
    Metric("applied_pushes", _COUNTER, "pushes", "pushes that this server has applied"),
    Metric("queued_pushes", _GAUGE, "pushes", "pushes in flight or in the queue of this worker"),
    Metric(
        "push_wait_seconds", _COUNTER, "s", "time in which a push waited for room", words="waited"
    ),
    Metric("merged_pushes", _COUNTER, "pushes", "pushes that went with another", words="merged"),
    Metric(
        "longest_push_queue", _GAUGE, "pushes", "most pushes in the queue", words="longest queue"
    ),
    Metric("exchanges", _COUNTER, "exchanges", "GeoSGD: differences exchanged with the servers"),
    Metric("local_rows", _GAUGE, "rows", "GeoSGD: rows that this worker keeps", words="rows here"),
    Metric(
        "rows_read_ahead",
        _COUNTER,
        "rows",
        "rows that arrived before their batch",
        words="prefetched rows",
    ),
    Metric(
        "rows_on_demand",
        _COUNTER,
        "rows",
        "rows of announced batches, fetched when needed",
        words="rows fetched on demand",
    ),
    Metric(
        "read_ahead_wait_seconds",
        _COUNTER,
        "s",
        "waits for rows that were on their way",
        words="waited for prefetched rows",
    ),
    Metric(
        "cached_rows_found",
        _COUNTER,
        "rows",
        "rows that lookups found on the device",
        words="rows found on the device",
    ),
    Metric(
        "cached_rows_copied",
        _COUNTER,
        "rows",
        "rows that were copied to the device",
        words="rows copied to it",
    ),
    Metric("sent_bytes", _COUNTER, "bytes", "bytes sent over connections to servers"),
    Metric("received_bytes", _COUNTER, "bytes", "bytes received over connections from servers"),
    Metric("host_sent_bytes", _COUNTER, "bytes", "bytes that left this host, from any process"),
    Metric("reconnects", _COUNTER, "connections", "connections to servers that were made again"),
    Metric("staleness", _COUNTS, "pushes", "pushes applied between the pull and the push of rows"),
    Metric("table_rows", _GAUGE, "rows", "rows of a table on this server", "table"),
    Metric("table_bytes", _GAUGE, "bytes", "memory of a table on this server", "table"),
    Metric("journal_bytes", _GAUGE, "bytes", "files of the journal since the last snapshot"),
    Metric("snapshot_age_seconds", _GAUGE, "s", "age of the newest snapshot of this server"),
    Metric("checkpoint_time_seconds", _GAUGE, "s", "when the last checkpoint was complete (Unix)"),
    Metric("publication_time_seconds", _GAUGE, "s", "when the last publication was made (Unix)"),
    Metric("cpu_seconds", _COUNTER, "s", "CPU time of this process"),
    Metric("resident_bytes", _GAUGE, "bytes", "memory of this process"),
    Metric("gpu_bytes", _GAUGE, "bytes", "memory of tensors on this worker's GPU"),
    Metric("dropped_values", _COUNTER, "values", "logged values whose names were over the limit"),
    Metric("dropped_labels", _COUNTER, "labels", "labels that were over the limit of a metric"),
)

#: all metrics, by name
METRICS = {metric.name: metric for metric in _METRICS}
