# SPDX-License-Identifier: Apache-2.0
"""Predictions: their limits, and that more of a resource never makes a job slower."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.launch.capacity.workloads import workload

from fleetlight.launch.capacity.prediction import (
    CONNECTION_BYTES,
    LINK,
    ROUND_TRIPS,
    SERVER_CPU,
    SHARED_CPU,
    SLOWEST,
    WORKER_CPU,
    Layout,
    alone_s,
    predict,
)
from fleetlight.launch.capacity.profile import ASYNC, GEO, SYNC, Lane, Line, Workload

#: of every byte on a link, the part that is payload
PAYLOAD = 1448 / 1514
MODES = (SYNC, ASYNC, GEO)


def test_one_worker_without_network_is_bound_by_its_cpu() -> None:
    one = predict(workload(), Layout(workers=1, servers=1))
    assert one.limit == WORKER_CPU
    assert one.step_s == pytest.approx(0.022)
    assert one.examples_per_s == pytest.approx(100 / 0.022)


def test_async_hides_the_push_behind_the_next_step() -> None:
    # half of the server's work belongs to the pull
    assert alone_s(workload(ASYNC)) == pytest.approx(0.021)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("servers", [1, 3])
def test_many_workers_reach_what_the_servers_can_do(mode: str, servers: int) -> None:
    many = predict(workload(mode), Layout(workers=100_000, servers=servers))
    assert many.limit == SERVER_CPU
    assert many.steps_per_s == pytest.approx(servers / 0.002, rel=0.02)
    assert many.use["server CPU"] == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("mode", [ASYNC, GEO])
def test_many_workers_fill_the_links_of_slow_servers(mode: str) -> None:
    layout = Layout(workers=10_000, servers=2, link_bits_per_s=1e8)
    many = predict(workload(mode), layout)
    assert many.limit == LINK
    assert many.steps_per_s == pytest.approx(2 * 1e8 / 8 * PAYLOAD / 2e6, rel=0.02)


def test_sync_uses_one_direction_of_a_link_at_a_time() -> None:
    layout = Layout(workers=1000, servers=1, link_bits_per_s=1e8)
    # half of the queues at the server are hidden by those at its link
    servers_s = (1000 * 0.002 + 0.002) / 2
    step_s = 0.020 + servers_s + 1000 * 4e6 * 8 / 1e8 / PAYLOAD
    assert predict(workload(SYNC), layout).step_s == pytest.approx(step_s)


def test_workers_of_one_host_share_its_cores_and_its_link() -> None:
    crowd = predict(workload(ASYNC), Layout(workers=8, servers=8, workers_per_host=8, cores=2))
    assert (crowd.limit, crowd.step_s) == (WORKER_CPU, pytest.approx(8 * 0.020 / 2))
    narrow = Layout(workers=8, servers=8, workers_per_host=8, cores=8, link_bits_per_s=1e9)
    assert predict(workload(ASYNC), narrow).step_s == pytest.approx(8 * 2e6 * 8 / 1e9 / PAYLOAD)


def test_hosts_that_share_their_cores_share_the_work_of_all() -> None:
    all_here = predict(workload(ASYNC), Layout(workers=8, servers=2, total_cores=2))
    assert (all_here.limit, all_here.steps_per_s) == (SHARED_CPU, pytest.approx(2 / 0.022))


def test_a_worker_and_its_server_use_shared_cores_at_once() -> None:
    # of the 22 ms of CPU the push, 1 ms, overlaps with the next step
    one = predict(workload(ASYNC), Layout(workers=1, servers=1, total_cores=2))
    assert one.step_s == pytest.approx(0.021)


def test_a_far_server_costs_round_trips() -> None:
    far = predict(workload(), Layout(workers=1, servers=1, round_trip_s=0.1))
    assert (far.limit, far.step_s) == (ROUND_TRIPS, pytest.approx(0.022 + 3 * 0.1))


def test_sync_waits_for_the_slowest_of_many() -> None:
    uneven = workload(spread=0.5)
    few, many = (predict(uneven, Layout(workers=n, servers=n)) for n in (1, 10_000))
    assert few.step_s == pytest.approx(0.022)
    wait = 0.5 * 0.020 * math.sqrt(2 * math.log(10_000))
    assert many.step_s == pytest.approx(0.022 + wait)
    assert many.limit == SLOWEST


def test_each_server_adds_a_request_to_a_step() -> None:
    work = workload(worker_cpu_s=Line(0.019, 0.001), server_cpu_s=Line(0.001, 0.001))
    assert predict(work, Layout(workers=1, servers=4)).step_s == pytest.approx(0.023 + 0.005 / 4)


def test_memory_has_rows_connections_and_their_last_messages() -> None:
    layout = Layout(workers=8, servers=2, rows=1_000_000)
    connections = 8 * 4 * CONNECTION_BYTES
    assert predict(workload(), layout).server_bytes == 1e6 + 5e7 + connections + 8 * 4e6 / 2


seconds = st.floats(1e-5, 1.0)
moved = st.floats(0.0, 1e8)
layouts = st.builds(
    Layout,
    workers=st.integers(1, 300),
    servers=st.integers(1, 20),
    workers_per_host=st.integers(1, 16),
    cores=st.integers(1, 16),
    link_bits_per_s=st.sampled_from([1e8, 1e9, 1e10, math.inf]),
    round_trip_s=st.floats(0.0, 0.01),
    total_cores=st.none() | st.integers(1, 64),
)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    mode = draw(st.sampled_from(MODES))
    lanes = {
        name: Lane(
            sent=Line(draw(moved)),
            received=Line(draw(moved)),
            overlaps=name == "push" and mode != SYNC,
            round_trips=1,
        )
        for name in ("pull", "push")
    }
    return workload(
        mode,
        worker_cpu_s=Line(draw(seconds)),
        server_cpu_s=Line(draw(seconds)),
        idle_s=draw(st.floats(0.0, 0.1)),
        spread=draw(st.floats(0.0, 1.0)),
        lanes=lanes,
    )


@pytest.mark.slow
@given(workloads(), layouts)
def test_no_resource_is_used_more_than_it_can_be(work: Workload, layout: Layout) -> None:
    one = predict(work, layout)
    assert math.isfinite(one.step_s)
    assert all(0 <= share <= 1 for share in one.use.values())
    resources = (layout.servers / work.server_cpu_s.fixed, layout.workers / work.worker_cpu_s.fixed)
    assert one.steps_per_s <= min(resources) * (1 + 1e-6)


@pytest.mark.slow
@given(workloads(), layouts)
def test_a_job_is_never_faster_than_its_workers_alone(work: Workload, layout: Layout) -> None:
    alone = predict(work, dataclasses.replace(layout, workers=1))
    assert predict(work, layout).step_s >= alone.step_s * (1 - 1e-6)


@pytest.mark.slow
@given(workloads(), layouts, st.integers(1, 100))
def test_more_workers_never_make_a_step_shorter(work: Workload, layout: Layout, more: int) -> None:
    larger = dataclasses.replace(layout, workers=layout.workers + more)
    assert predict(work, larger).step_s >= predict(work, layout).step_s * (1 - 1e-6)


@pytest.mark.slow
@given(workloads(), layouts, st.integers(1, 8), st.floats(1.0, 10.0))
def test_more_of_a_resource_never_makes_a_step_longer(
    work: Workload, layout: Layout, cores: int, faster: float
) -> None:
    now = predict(work, layout).step_s * (1 + 1e-6)
    for better in (
        dataclasses.replace(layout, cores=layout.cores + cores),
        dataclasses.replace(layout, link_bits_per_s=layout.link_bits_per_s * faster),
        dataclasses.replace(layout, servers=layout.servers + cores, total_cores=None),
    ):
        if better.total_cores == layout.total_cores:
            assert predict(work, better).step_s <= now
