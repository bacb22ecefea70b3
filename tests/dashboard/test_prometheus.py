# SPDX-License-Identifier: Apache-2.0
"""The text that Prometheus reads, and the dashboard of Grafana that asks for its names."""

import json
import math
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleetlight.dashboard.feed import JobFeed
from fleetlight.dashboard.prometheus import PREFIX, RESTARTS, UP, metrics_text
from fleetlight.dashboard.view.facts import ProcessReading
from fleetlight.observe.telemetry.catalogue import METRICS, MetricKind
from fleetlight.observe.telemetry.recorder import MetricRecorder
from fleetlight.observe.telemetry.registry import Registry
from fleetlight.observe.telemetry.snapshot import labelled


def _reading(index: int = 0, *, is_up: bool = True, **values: float) -> ProcessReading:
    return ProcessReading(
        kind="worker", index=index, is_up=is_up, restarts=2, values=values, counts={}
    )


def _samples(readings: list[ProcessReading]) -> dict[tuple[str, ...], float]:
    """The samples as Prometheus would parse them: name and values of labels."""
    text = metrics_text(lambda: readings).decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _every_metric() -> ProcessReading:
    values = {
        labelled(name, "one") if metric.label else name: 1.0
        for name, metric in METRICS.items()
        if metric.kind is not MetricKind.COUNTS
    }
    counts = {name: {0: 1} for name, one in METRICS.items() if one.kind is MetricKind.COUNTS}
    return ProcessReading(
        kind="worker", index=0, is_up=True, restarts=0, values=values, counts=counts
    )


def test_each_metric_of_the_catalogue_is_exported() -> None:
    names = {name for name, *_ in _samples([_every_metric()])}
    for metric in METRICS.values():
        suffix = {MetricKind.COUNTER: "_total", MetricKind.COUNTS: "_bucket"}.get(metric.kind, "")
        assert f"{PREFIX}{metric.name}{suffix}" in names


def test_labels_are_role_index_and_that_of_the_metric() -> None:
    found = _samples([_reading(3, **{labelled("table_rows", 'a "b"\\c'): 5.0, "steps": 7.0})])
    assert found[("fleetlight_table_rows", "3", "worker", 'a "b"\\c')] == 5.0
    assert found[("fleetlight_steps_total", "3", "worker")] == 7.0
    assert found[("fleetlight_restarts_total", "3", "worker")] == 2.0


def test_a_process_that_is_down_has_only_that() -> None:
    found = _samples([_reading(0, is_up=False, steps=7.0), _reading(1, steps=8.0)])
    assert found[("fleetlight_up", "0", "worker")] == 0.0
    assert found[("fleetlight_restarts_total", "0", "worker")] == 2.0
    names = {name for name, index, *_ in found if index == "0" and not name.endswith("_created")}
    assert names == {"fleetlight_up", "fleetlight_restarts_total"}
    assert found[("fleetlight_steps_total", "1", "worker")] == 8.0


def test_values_that_are_not_finite_are_passed_on(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(lambda: {"steps": 7})
    registry.logged.add({"loss": math.nan, "norm": math.inf})
    MetricRecorder(tmp_path, "worker", 0, registry).close()
    found = _samples(JobFeed(tmp_path).newest())
    assert found[("fleetlight_steps_total", "0", "worker")] == 7.0
    assert math.isnan(found[("fleetlight_logged", "0", "loss", "worker")])
    assert found[("fleetlight_logged", "0", "norm", "worker")] == math.inf


def test_counts_are_a_histogram() -> None:
    counts = {"staleness": {0: 5, 3: 2, 100: 1}}
    reading = ProcessReading(
        kind="server", index=0, is_up=True, restarts=0, values={}, counts=counts
    )
    found = _samples([reading])
    assert found[("fleetlight_staleness_bucket", "0", "2.0", "server")] == 5.0
    assert found[("fleetlight_staleness_bucket", "0", "4.0", "server")] == 7.0
    assert found[("fleetlight_staleness_bucket", "0", "+Inf", "server")] == 8.0
    assert found[("fleetlight_staleness_sum", "0", "server")] == 106.0


def test_workers_that_invent_labels_have_a_maximum() -> None:
    readings = [
        _reading(index, **{labelled("logged", f"{index}-{n}"): 1.0 for n in range(200)})
        for index in range(5)
    ]
    found = [name for name in _samples(readings) if name[0] == "fleetlight_logged"]
    assert len(found) == 256


def _grafana() -> dict[str, Any]:
    text = resources.files("fleetlight.dashboard").joinpath("grafana.json").read_text("utf-8")
    board: dict[str, Any] = json.loads(text)
    return board


def test_grafana_asks_for_names_that_are_exported() -> None:
    exported = {name for name, *_ in _samples([_every_metric()])}
    board = _grafana()
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    asked = {name for query in queries for name in re.findall(r"\bfleetlight_\w+", query)}
    assert len(asked) > 25
    assert asked <= exported
    assert {f"{PREFIX}{UP}", f"{PREFIX}{RESTARTS}_total"} <= asked


def test_panels_of_grafana_have_places_of_their_own() -> None:
    panels = _grafana()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    }
    assert len(places) == sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in panels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs apt-get install prometheus")
def test_promtool_finds_no_fault() -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics", "--extended"],
        input=metrics_text(lambda: [_every_metric()]),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
