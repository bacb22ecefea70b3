# SPDX-License-Identifier: Apache-2.0
"""Predictions beside runs: where processes run, and the errors that the page states."""

from __future__ import annotations

import dataclasses

import pytest
from tests.launch.capacity.workloads import workload

from benchmarks import jobs, scaling
from fleetlight.launch.capacity.prediction import Layout, predict
from fleetlight.launch.capacity.profile import ASYNC


@dataclasses.dataclass(frozen=True)
class Place:
    prefix: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Places:
    """The part of a rig that a job reads."""

    hosts: tuple[Place, ...] = tuple(Place(("in", f"h{n}")) for n in range(6))
    addresses: tuple[str, ...] = tuple(f"10.0.0.{n}" for n in range(6))


def test_servers_have_hosts_of_their_own_and_workers_share_two() -> None:
    one = predict(workload(), Layout(workers=3, servers=2))
    job = scaling.job("some", "wide_deep", "sync", one, Places())  # type: ignore[arg-type]
    assert [command.argv[1] for command in job.commands] == ["h0", "h1", "h2", "h3", "h2"]
    endpoints = [c.environment["FLEET_SERVER_ENDPOINTS"].split(",") for c in job.commands]
    assert all(
        [e.partition(":")[0] for e in each] == ["10.0.0.0", "10.0.0.1"] for each in endpoints
    )
    assert [c.environment["FLEET_ROLE"] for c in job.commands] == ["server"] * 2 + ["worker"] * 3


@pytest.mark.parametrize(("workers", "beside"), [(1, 1), (2, 1), (4, 2), (16, 8)])
def test_the_layout_is_that_of_the_job(workers: int, beside: int) -> None:
    assert scaling.layout(workers, 1, 1e9).workers_per_host == beside


def run(seconds: float, foreign: float = 0.0) -> jobs.Run:
    """A worker that makes 10 steps, and uses 0.3 s of CPU with 0.1 s of the server."""
    result = {"steps": 10, "examples": 10 * scaling.BATCH, "seconds": seconds}
    result |= {"cpu_seconds": 0.3, "server_cpu_seconds": 0.1, "server_mib": 7.0}
    return jobs.Run(9.0, 1.0, foreign, [result])


def point(*runs: jobs.Run) -> scaling.Point:
    layout = dataclasses.replace(Layout(workers=1, servers=1), total_cores=2)
    return scaling.Point("wide_deep", ASYNC, "1 Gbit/s", workload(ASYNC), layout, runs)


def test_the_error_is_the_median_over_the_runs() -> None:
    # a step is predicted to take 21 ms
    assert point(run(0.42)).error == pytest.approx(1.0)
    assert point(run(0.42), run(0.21), run(0.105)).error == pytest.approx(0.0)


def test_a_prediction_counts_on_the_cores_that_other_programs_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaling.machine, "cores", lambda: 2)
    # 0.2 cores for 22 ms of work
    assert point(run(0.22 / 0.2, foreign=0.9)).error == pytest.approx(0.0)


def test_the_page_names_the_worst_error_and_the_cost_in_cpu_time() -> None:
    good, bad = point(run(0.21)), point(run(0.42))
    text = scaling.summary([good, good, bad])
    assert "Median error 0.0%, at most 15%: met. 2 of 3 layouts" in text
    assert "The worst: +100%, wide_deep async, 1 workers, 1 servers, 1 Gbit/s." in text
    assert good.cpu_ms == pytest.approx((22, 40))
    table = scaling.section([good], "wide_deep", ASYNC)
    assert "| 1 Gbit/s | 1 | 1 | 22.0 / 40.0 |" in table
    assert scaling.section([good], "word2vec", ASYNC) == ""
