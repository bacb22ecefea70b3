# SPDX-License-Identifier: Apache-2.0
"""What a snapshot has: all sources, logged values, few labels."""

import logging
import math

import pytest
import torch

from fleetlight.errors import ConfigError
from fleetlight.observe.telemetry.catalogue import METRICS, MetricKind
from fleetlight.observe.telemetry.logged_values import MAX_NAMES
from fleetlight.observe.telemetry.registry import MAX_LABELS, Registry
from fleetlight.observe.telemetry.snapshot import labelled, split_key


def test_sources_are_asked_until_they_are_removed() -> None:
    registry = Registry()
    remove = registry.add(lambda: {"steps": 3})
    registry.add(lambda: {"staleness": {0: 2, 1: 1}})
    snapshot = registry.snapshot()
    assert snapshot.values["steps"] == 3.0
    assert snapshot.values["cpu_seconds"] > 0
    assert snapshot.values["resident_bytes"] > 1 << 20
    assert snapshot.counts == {"staleness": {0: 2, 1: 1}}
    remove()
    assert "steps" not in registry.snapshot().values


def test_a_source_that_fails_leaves_the_others() -> None:
    registry = Registry()
    registry.add(lambda: {"steps": 1 / 0})
    registry.add(lambda: {"samples": 2})
    assert registry.snapshot().values["samples"] == 2.0
    assert "steps" not in registry.snapshot().values


def test_a_name_outside_the_catalogue_is_an_error() -> None:
    registry = Registry()
    registry.add(lambda: {"stpes": 1})
    with pytest.raises(KeyError, match="stpes"):
        registry.snapshot()


def test_labels_beyond_the_limit_are_dropped_and_counted() -> None:
    registry = Registry()
    registry.add(lambda: {labelled("table_rows", str(n)): n for n in range(MAX_LABELS + 7)})
    values = registry.snapshot().values
    assert sum(key.startswith("table_rows") for key in values) == MAX_LABELS
    assert values["dropped_labels"] == 7.0


def test_logged_values_are_means_since_the_last_snapshot() -> None:
    registry = Registry()
    for value in (1.0, torch.tensor(3.0, requires_grad=True)):
        registry.logged.add({"loss": value})
    assert registry.snapshot(takes=False).values["logged{loss}"] == 2.0
    assert registry.snapshot().values["logged{loss}"] == 2.0
    # without new values, the last one
    assert registry.snapshot().values["logged{loss}"] == 2.0
    registry.logged.add({"loss": 8, "auc": 0.5})
    values = registry.snapshot().values
    assert (values["logged{loss}"], values["logged{auc}"]) == (8.0, 0.5)


def test_a_tensor_that_changes_later_was_logged_as_it_was() -> None:
    registry, value = Registry(), torch.tensor([2.0])
    registry.logged.add({"loss": value})
    value.zero_()
    assert registry.snapshot().values["logged{loss}"] == 2.0


def test_a_nan_shows() -> None:
    registry = Registry()
    registry.logged.add({"loss": 1.0})
    registry.logged.add({"loss": float("nan")})
    assert math.isnan(registry.snapshot().values["logged{loss}"])


def test_many_values_between_snapshots_take_little_memory() -> None:
    registry = Registry()
    for value in range(10_000):
        registry.logged.add({"step": float(value), "loss": torch.tensor(value, dtype=torch.half)})
    assert registry.logged.now()["logged{step}"] == 4999.5
    assert len(registry.logged._waiting["step"]._values) < 5000
    values = registry.snapshot().values
    assert values["logged{step}"] == 4999.5
    assert values["logged{loss}"] == pytest.approx(4999.5, rel=1e-3)


def test_names_beyond_the_limit_take_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    with caplog.at_level(logging.WARNING, "fleetlight"):
        for number in range(MAX_NAMES + 500):
            registry.logged.add({f"loss_{number}": 1.0, "loss_0": 2.0})
    [warned] = caplog.messages
    assert f"got 'loss_{MAX_NAMES}' after {MAX_NAMES} other names" in warned
    values = registry.snapshot().values
    assert sum(key.startswith("logged{") for key in values) == MAX_NAMES
    assert values["dropped_values"] == 500.0
    assert len(registry.logged._last) == len(registry.logged._names) == MAX_NAMES


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("loss", torch.zeros(3), r"got a tensor of shape \(3,\), expected one number"),
        ("loss", torch.tensor(1j), "got a complex tensor, expected a real number"),
        ("loss", "high", "got 'high' \\(str\\), expected one number"),
        ("a{b}", 1.0, "expected 1 to 64 characters without braces"),
        ("x" * 65, 1.0, "expected 1 to 64 characters"),
    ],
)
def test_nonsense_is_refused(name: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Registry().logged.add({name: value})


def test_events_are_taken_once() -> None:
    registry = Registry(clock=lambda: 5.0)
    registry.event("worker 0", "checkpoint", "saved step 3")
    assert [(one.at, one.kind) for one in registry.take_events()] == [(5.0, "checkpoint")]
    assert registry.take_events() == []
    assert registry.snapshot().values["checkpoint_time_seconds"] == 5.0


def test_keys_have_names_and_labels() -> None:
    assert split_key(labelled("table_rows", "users")) == ("table_rows", "users")
    assert split_key("steps") == ("steps", "")


def test_the_catalogue_is_complete() -> None:
    for name, metric in METRICS.items():
        assert name == metric.name
        assert metric.help
        ending = {"s": "_seconds", "bytes": "_bytes"}.get(metric.unit)
        assert ending is None or name.endswith(ending), name
        assert metric.kind is not MetricKind.COUNTS or not metric.label
