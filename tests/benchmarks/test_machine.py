# SPDX-License-Identifier: Apache-2.0
"""The description of the machine, and the load of other programs."""

from __future__ import annotations

import pytest

from benchmarks import machine


def test_foreign_share_excludes_our_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)
    assert machine.foreign_share(wall_s=10.0, busy=12.0, own_s=2.0) == 0.5
    assert machine.foreign_share(wall_s=10.0, busy=1.9, own_s=2.0) == 0.0
    assert machine.foreign_share(wall_s=10.0, busy=None, own_s=2.0) is None


def test_the_meter_measures_wall_time_without_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "busy_s", lambda: None)
    with machine.Meter() as meter:
        pass
    assert meter.wall_s > 0
    assert meter.busy_s is None


def test_the_meter_counts_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([5.0, 7.5])
    monkeypatch.setattr(machine, "busy_s", lambda: next(seen))
    with machine.Meter() as meter:
        pass
    assert meter.busy_s == 2.5


def test_waiting_for_an_idle_machine_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "busy_s", iter(range(0, 10**6, 1000)).__next__)
    machine.wait_until_idle(0.01, sample_s=0.001)


def test_the_description_is_complete() -> None:
    facts = machine.describe()
    assert all(facts.values())
    assert facts["memory"].endswith("GiB")
