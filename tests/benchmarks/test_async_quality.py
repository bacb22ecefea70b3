# SPDX-License-Identifier: Apache-2.0
"""Asynchronous quality: what is compared, and when the bar is met."""

from __future__ import annotations

import pytest

import fleetlight as fleet
from benchmarks import async_quality


@pytest.mark.parametrize("mode", [*async_quality.MODES, *async_quality.OTHERS])
def test_every_mode_is_a_strategy(mode: str) -> None:
    strategy = fleet.DistributedStrategy(**async_quality.settings(mode))
    assert strategy.a_sync == (mode != async_quality.SYNC)


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ([94.0, 93.5, 92.0], "met"),
        ([92.9, 92.8, 94.0], "missed"),
        ([94.0, 94.0, 90.9], "missed"),
    ],
    ids=["near", "median too low", "worst too low"],
)
def test_median_and_worst_count(accuracies: list[float], verdict: str) -> None:
    one = async_quality.Reached("async", accuracies, [94.0, 93.0, 95.0])
    assert one.verdict == verdict


def test_servers_and_workers_are_told_who_they_are() -> None:
    each = async_quality._environments(4)
    assert [one["FLEET_ROLE"] for one in each] == ["worker"] * 4 + ["server"] * 2
    assert [one["FLEET_INDEX"] for one in each] == ["0", "1", "2", "3", "0", "1"]
