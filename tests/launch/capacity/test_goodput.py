# SPDX-License-Identifier: Apache-2.0
"""Goodput by formula equals that of simulated failures."""

from __future__ import annotations

import random

import pytest

from fleetlight.launch.capacity.goodput import FailureModel, best_interval, goodput

DAY_S = 86_400.0
FAILURES = FailureModel(mtbf_s=20 * DAY_S, restart_s=60.0, save_s=10.0)


def simulated_checkpoints(between_s: float, every_s: float, failures: FailureModel) -> float:
    """The share of time whose work is kept, by playing failures."""
    chance = random.Random(1)
    now = kept = 0.0
    next_failure = chance.expovariate(1 / between_s)
    while now < 3000 * between_s:
        end = now + every_s + failures.save_s
        if end <= next_failure:
            now, kept = end, kept + every_s
            continue
        # a failure during the restart begins it again
        now = next_failure
        while True:
            next_failure = now + chance.expovariate(1 / between_s)
            if next_failure >= now + failures.restart_s:
                now += failures.restart_s
                break
            now = next_failure
    return kept / now


@pytest.mark.parametrize("between_s", [200.0, 1000.0, 20_000.0])
def test_checkpoints_equal_a_simulation(between_s: float) -> None:
    every_s = best_interval(between_s, FAILURES)
    size = round(FAILURES.mtbf_s / between_s)
    found = goodput(size - 1, 1, "async", FAILURES)
    expected = simulated_checkpoints(between_s, every_s, FAILURES)
    assert found.with_checkpoints == pytest.approx(expected, abs=0.015)


def test_the_best_interval_is_better_than_others() -> None:
    every_s = best_interval(2000.0, FAILURES)
    best = simulated_checkpoints(2000.0, every_s, FAILURES)
    for factor in (0.3, 3.0):
        assert simulated_checkpoints(2000.0, every_s * factor, FAILURES) < best
    # Young's approximation for rare failures
    assert best_interval(1e6, FAILURES) == pytest.approx((2 * 10.0 * 1e6) ** 0.5, rel=0.05)


def simulated_log(workers: int, servers: int, needs_workers: bool, failures: FailureModel) -> float:
    """The share of time in which workers are at work, by playing each process."""
    chance = random.Random(2)
    share, draws = 0.0, 20_000
    # at a random moment each process is away with this probability
    away = failures.restart_s / (failures.mtbf_s + failures.restart_s)
    for _ in range(draws):
        lost_servers = any(chance.random() < away for _ in range(servers))
        lost_workers = sum(chance.random() < away for _ in range(workers))
        if not lost_servers and not (needs_workers and lost_workers):
            share += 1 - lost_workers / workers
    return share / draws


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_log_equals_a_simulation(mode: str) -> None:
    failures = FailureModel(mtbf_s=10_000.0, restart_s=20.0, save_s=1.0)
    found = goodput(40, 8, mode, failures).with_log
    expected = simulated_log(40, 8, mode == "sync", failures)
    assert found == pytest.approx(expected, abs=0.02)


def test_a_job_that_fails_faster_than_it_restarts_makes_no_progress() -> None:
    failures = FailureModel(mtbf_s=1000.0, restart_s=600.0, save_s=10.0)
    assert goodput(1_000_000, 100, "sync", failures).with_checkpoints == 0.0


def test_large_jobs() -> None:
    small, large = (goodput(n, n // 10, "async", FAILURES) for n in (10, 1000))
    assert large.failures_per_h == pytest.approx(2.29, abs=0.01)
    assert small.with_checkpoints > large.with_checkpoints
    assert large.with_log > large.with_checkpoints
    assert goodput(1000, 100, "sync", FAILURES).with_log < large.with_log
