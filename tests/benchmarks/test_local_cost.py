# SPDX-License-Identifier: Apache-2.0
"""The cost of inert settings: the bars, and that all settings are valid."""

from __future__ import annotations

import pytest
from benchmarks.report import Series

from benchmarks import local_cost
from fleetlight import DistributedStrategy


@pytest.mark.parametrize(
    ("rate", "cpu", "speed", "cost"),
    [(98.0, 10.2, "met", "met"), (96.0, 10.2, "missed", "met"), (98.0, 10.4, "met", "missed")],
    ids=["fine", "slow", "expensive"],
)
def test_speed_and_cpu_have_separate_bars(rate: float, cpu: float, speed: str, cost: str) -> None:
    series = {
        "ddp": Series("ddp", [100.0], [10.0]),
        "ddp again": Series("ddp again", [101.0], [10.0]),
        "fleetlight": Series("fleetlight", [rate], [cpu]),
    }
    found = local_cost.row("int8", series)
    assert found[2] == f"0.970: {speed}"
    assert found[3] == "1.01 (1.01..1.01)"
    assert found[5] == f"1.03: {cost}"


def test_every_mode_is_valid_and_runs_on_a_workload() -> None:
    for mode, settings in local_cost.MODES.items():
        DistributedStrategy(**settings)
        assert set(local_cost.ONLY.get(mode, local_cost.TURNS)) <= set(local_cost.TURNS)
