# SPDX-License-Identifier: Apache-2.0
"""`/metrics`: the newest metrics of all processes in Prometheus' format.

Names are those of the catalogue, with the prefix `fleetlight_`. A process that does not run has
`fleetlight_up` 0 and `fleetlight_restarts_total`, but no other metric: its last values would look
current.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from fleetlight.dashboard.view.facts import ProcessReading
from fleetlight.observe.telemetry.catalogue import METRICS, Metric, MetricKind
from fleetlight.observe.telemetry.snapshot import split_key

PREFIX = "fleetlight_"
#: what the launcher says of a process, beyond its metrics
UP, RESTARTS = "up", "restarts"
_ROLE = ("role", "index")
#: labels of one metric in the whole job; a script may invent more
_MAX_LABELS = 256
_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64)
Readings = Callable[[], Sequence[ProcessReading]]
#: the labels of a process, the label of a value, and the value
_Value = tuple[tuple[str, str], str, float]


class JobCollector(Collector):
    """Exports the newest metrics of a job."""

    def __init__(self, read: Readings) -> None:
        self._read = read

    def collect(self) -> Iterator[MetricFamily]:
        """The metrics now, as Prometheus has them."""
        readings = self._read()
        up = GaugeMetricFamily(f"{PREFIX}{UP}", "1 while the process runs", labels=_ROLE)
        restarts = CounterMetricFamily(
            f"{PREFIX}{RESTARTS}", "starts after a failure", labels=_ROLE
        )
        for one in readings:
            up.add_metric(one.role, float(one.is_up))
            restarts.add_metric(one.role, one.restarts)
        yield up
        yield restarts
        running = [one for one in readings if one.is_up]
        values = _by_metric(running)
        for metric in METRICS.values():
            if metric.kind is MetricKind.COUNTS:
                yield _histogram(metric, running)
            else:
                yield _family(metric, values.get(metric.name, ()))


def metrics_text(read: Readings) -> bytes:
    """The text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(read))
    return bytes(generate_latest(registry))


def _by_metric(readings: Iterable[ProcessReading]) -> Mapping[str, Sequence[_Value]]:
    """All values of each metric, with a maximum of labels."""
    found: dict[str, list[_Value]] = {}
    known: dict[str, set[str]] = {}
    for one in readings:
        for key, value in one.values.items():
            name, label = split_key(key)
            labels = known.setdefault(name, set())
            if label in labels or len(labels) < _MAX_LABELS:
                labels.add(label)
                found.setdefault(name, []).append((one.role, label, value))
    return found


def _family(metric: Metric, values: Iterable[_Value]) -> MetricFamily:
    labels = (*_ROLE, *([metric.label] if metric.label else []))
    is_counter = metric.kind is MetricKind.COUNTER
    family = (CounterMetricFamily if is_counter else GaugeMetricFamily)(
        f"{PREFIX}{metric.name}", metric.help, labels=labels
    )
    for role, label, value in values:
        family.add_metric((*role, *([label] if metric.label else [])), value)
    return family


def _histogram(metric: Metric, readings: Iterable[ProcessReading]) -> MetricFamily:
    family = HistogramMetricFamily(f"{PREFIX}{metric.name}", metric.help, labels=_ROLE)
    for one in readings:
        if (counts := one.counts.get(metric.name)) is not None:
            total = float(sum(number * times for number, times in counts.items()))
            family.add_metric(one.role, _buckets(counts), total)
    return family


def _buckets(counts: Mapping[int, int]) -> list[tuple[str, float]]:
    found = [
        (f"{bound:.1f}", float(sum(times for n, times in counts.items() if n <= bound)))
        for bound in _BUCKETS
    ]
    return [*found, ("+Inf", float(sum(counts.values())))]
