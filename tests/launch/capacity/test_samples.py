# SPDX-License-Identifier: Apache-2.0
"""Workloads from samples that are made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from fleetlight.errors import ConfigError
from fleetlight.launch.capacity.prediction import Layout, alone_s, predict
from fleetlight.launch.capacity.profile import ASYNC, GEO, SYNC
from fleetlight.launch.capacity.samples import (
    Observed,
    ServerSample,
    WorkerSample,
    other_programs,
    workload_of,
)

#: steps of 50 ms
STEP_S = 0.05


def worker(at: float, servers: int, mode: str = SYNC, **changed: object) -> WorkerSample:
    """A worker that starts training at 10 s; a step takes 20 ms of CPU and 1 ms a server."""
    steps = max(0, round((at - 10) / STEP_S))
    sample = WorkerSample(
        at=at,
        cpu_s=3 + steps * (0.020 + 0.001 * servers),
        busy_s=100 + at,
        ready_s=1.0,
        memory=300,
        mode=mode,
        k_steps=0,
        tables=2,
        steps=steps,
        batch=64 if steps else None,
        lanes={
            "control": (10, 10),
            "pull": (steps * 80, steps * 400),
            "push": (steps * (1000 + 10 * servers), steps * 900),
        },
        intervals=(steps, steps * STEP_S, steps * (STEP_S**2 + 0.01**2)),
    )
    return msgspec.structs.replace(sample, **changed)


def server(at: float, servers: int) -> ServerSample:
    """A server whose CPU time grows by the same in every second."""
    cpu_s = 7 + (at - 10) / STEP_S * (0.006 + 0.001 * servers) / servers
    return ServerSample(at=at, cpu_s=cpu_s, ready_s=0.0, memory=5000, rows=40, row_bytes=4000)


def observed(servers: int, until: float = 15.0, **changed: object) -> Observed:
    times = [9.5 + 0.5 * n for n in range(round((until - 9.5) / 0.5) + 1)]
    # servers look at other times than the worker
    of_servers = [[server(at + 0.2, servers) for at in (9.0, *times)] for _ in range(servers)]
    return Observed([worker(at, servers, **changed) for at in times], of_servers)  # type: ignore[arg-type]


def test_a_workload_is_the_line_through_two_probes() -> None:
    work = workload_of(observed(1), observed(4))
    assert (work.worker_cpu_s.fixed, work.worker_cpu_s.per_server) == pytest.approx((0.02, 0.001))
    assert (work.server_cpu_s.fixed, work.server_cpu_s.per_server) == pytest.approx((0.006, 0.001))
    push = work.lanes["push"]
    assert (push.sent.fixed, push.sent.per_server) == pytest.approx((1000, 10))
    assert (push.received.at(1), push.received.at(9)) == pytest.approx((900, 900))
    assert list(work.lanes) == ["pull", "push"]
    assert (work.batch, work.connections, work.mode) == (64, 3, SYNC)


def test_the_prediction_of_the_probe_is_the_probe() -> None:
    work = workload_of(observed(1), observed(4))
    # the rest of its 50 ms is neither CPU time of the worker nor of the server
    assert work.idle_s == pytest.approx(STEP_S - 0.021 - 0.007)
    assert alone_s(work) == pytest.approx(STEP_S)
    assert predict(work, Layout(workers=1, servers=4)).step_s == pytest.approx(
        STEP_S + 3 * 0.001 + 0.010 / 4 - 0.007
    )


def test_time_that_other_programs_took_is_no_part_of_a_step() -> None:
    crowded = observed(1)
    late = [
        msgspec.structs.replace(sample, ready_s=1 + 0.01 * sample.steps)
        for sample in crowded.worker
    ]
    work = workload_of(Observed(late, crowded.servers), observed(4))
    assert work.idle_s == pytest.approx(STEP_S - 0.021 - 0.007 - 0.01)


def test_the_share_of_other_programs_is_what_the_job_did_not_use() -> None:
    # one of four cores is busy; a step of 50 ms uses 28 ms of it, or 34 with four servers
    share = other_programs([observed(1), observed(4)], cores=4)
    assert share == pytest.approx((1 - 0.028 / STEP_S) / 4)


def test_memory_of_a_server_is_apart_from_its_rows() -> None:
    work = workload_of(observed(1), observed(4))
    assert (work.rows, work.row_bytes, work.server_bytes) == (40, 100, 1000)


def test_the_spread_is_that_of_the_steps() -> None:
    assert workload_of(observed(1), observed(4)).spread == pytest.approx(0.01 / STEP_S)


@pytest.mark.parametrize(("mode", "waits"), [(SYNC, ["pull", "push"]), (ASYNC, ["pull"])])
def test_training_waits_for_pulls_and_in_sync_for_pushes(mode: str, waits: list[str]) -> None:
    work = workload_of(observed(1, mode=mode), observed(4, mode=mode))
    assert [name for name, lane in work.lanes.items() if not lane.overlaps] == waits
    assert work.lanes["pull"].round_trips == 2


def test_a_lane_without_requests_has_no_round_trips() -> None:
    few, many = (observed(servers) for servers in (1, 4))
    for sample in (*few.worker, *many.worker):
        sample.lanes["pull"] = (70, 70)
    assert workload_of(few, many).lanes["pull"].round_trips == 0


def test_noise_never_makes_a_cost_fall_with_more_servers() -> None:
    few, many = observed(1), observed(4)
    quick = [
        msgspec.structs.replace(sample, cpu_s=3 + sample.steps * 0.019) for sample in many.worker
    ]
    line = workload_of(few, Observed(quick, many.servers)).worker_cpu_s
    assert (line.fixed, line.per_server) == pytest.approx((0.021, 0.0))


@pytest.mark.parametrize(
    ("until", "changed", "enough"),
    [
        # the first step is seen at 10.5, and the counted ones begin a second later
        (14.0, {}, False),
        (14.5, {}, True),
        (14.5, {"mode": GEO, "k_steps": 100}, False),
        (26.5, {"mode": GEO, "k_steps": 100}, True),
        (15.0, {"steps": 0}, False),
        (15.0, {"steps": 9}, False),
    ],
)
def test_a_probe_ends_after_enough_steps(
    until: float, changed: dict[str, object], enough: bool
) -> None:
    assert (observed(1, until, **changed).window() is not None) == enough


def test_a_system_that_counts_no_bytes_is_an_error() -> None:
    blind: Sequence[WorkerSample] = [
        msgspec.structs.replace(sample, lanes=dict.fromkeys(sample.lanes, (0, 0)))
        for sample in observed(1).worker
    ]
    with pytest.raises(ConfigError, match="does not count the bytes"):
        workload_of(Observed(blind, observed(1).servers), observed(4))
