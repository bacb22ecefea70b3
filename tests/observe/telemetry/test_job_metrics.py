# SPDX-License-Identifier: Apache-2.0
"""Metrics of a whole job from those of its processes."""

import math

import pytest

from fleetlight.observe.telemetry.history import Series
from fleetlight.observe.telemetry.job_metrics import job_metrics
from fleetlight.observe.telemetry.snapshot import Snapshot


def series(*moments: tuple[float, dict[str, float]], pid: int = 1, **counts: object) -> Series:
    made = Series()
    for at, values in moments:
        made.add(Snapshot(at, pid, values, counts))  # type: ignore[arg-type]
    return made


def test_workers_add_up_or_average() -> None:
    first = series(
        (0.0, {"samples": 0, "steps": 0}), (10.0, {"samples": 100, "steps": 10, "logged{loss}": 1})
    )
    second = series(
        (0.0, {"samples": 0, "steps": 0}), (10.0, {"samples": 300, "steps": 20, "logged{loss}": 3})
    )
    step, found = job_metrics({"worker.0": first, "worker.1": second}, 11.0, 10.0)
    assert step == 20
    assert found["samples_per_second"] == 40.0
    assert found["steps_per_second"] == 1.5
    assert found["loss"] == 2.0


def test_servers_add_up() -> None:
    one = series((1.0, {"table_rows{users}": 5}), staleness={0: 1, 2: 3})
    other = series((1.0, {"table_rows{users}": 7}), staleness={4: 2})
    _, found = job_metrics({"server.0": one, "server.1": other}, 2.0, 10.0)
    assert found["table_rows/users"] == 12.0
    assert found["staleness"] == pytest.approx(14 / 6)


def test_shares_of_a_step_add_up_to_one() -> None:
    one = series(
        (0.0, {"step_wait_seconds": 0.0, "step_forward_seconds": 0.0}),
        (4.0, {"step_wait_seconds": 3.0, "step_forward_seconds": 1.0}),
    )
    _, found = job_metrics({"worker.0": one}, 5.0, 10.0)
    assert (found["step_share/wait"], found["step_share/forward"]) == (0.75, 0.25)


def test_a_process_that_is_gone_does_not_count() -> None:
    lost = series((0.0, {"steps": 9, "logged{loss}": 100.0}))
    here = series((99.0, {"steps": 3, "logged{loss}": 1.0}))
    step, found = job_metrics({"worker.0": lost, "worker.1": here}, 100.0, 5.0)
    assert (step, found["loss"]) == (3, 1.0)


@pytest.mark.parametrize("other", [math.nan, math.inf, -math.inf])
def test_a_worker_without_a_finite_value_shows_in_the_mean(other: float) -> None:
    one = series((1.0, {"logged{loss}": other, "logged{auc}": 0.5}))
    two = series((1.0, {"logged{loss}": math.inf}))
    _, found = job_metrics({"worker.0": one, "worker.1": two}, 2.0, 10.0)
    assert not math.isfinite(found["loss"])
    assert found["auc"] == 0.5


def test_an_empty_job_has_no_metrics() -> None:
    assert job_metrics({}, 1.0, 1.0)[0] == 0
