# SPDX-License-Identifier: Apache-2.0
"""Asynchronous quality: the compared modes, and the verdicts."""

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
def test_median_and_worst_decide_the_verdict(accuracies: list[float], verdict: str) -> None:
    reached = async_quality.Reached("async", accuracies, [94.0, 93.0, 95.0])
    assert reached.verdict == verdict


def test_servers_and_workers_receive_their_roles() -> None:
    environments = async_quality._environments(4)
    assert [reached["FLEET_ROLE"] for reached in environments] == ["worker"] * 4 + ["server"] * 2
    assert [reached["FLEET_INDEX"] for reached in environments] == ["0", "1", "2", "3", "0", "1"]
