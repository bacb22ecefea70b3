# SPDX-License-Identifier: Apache-2.0
"""ShardQueueHandler: leases of records, waiting workers, and recovery after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ps.restartable import RestartableCluster
from tests.ps.serving import Worker, ask, closed_server, open_up, opened, plan, team, together

from fleetlight.errors import MembershipError
from fleetlight.ps import messages as m
from fleetlight.ps.server.durability.durability import Durable
from fleetlight.ps.server.shard_queue import handler


def lease(worker: Worker, *arguments: Any, **facts: Any) -> tuple[int, int] | None:
    reply, _ = worker.say(ask(*arguments, **facts))
    return (reply.start, reply.stop) if isinstance(reply, m.LeaseReply) else None


def remaining(worker: Worker) -> Any:
    return worker.say(m.RemainingRequest(0, 1))[0].ranges


def test_workers_lease_ranges() -> None:
    first, second = team(opened(plan("async")))
    assert (lease(first), lease(second), lease(first, 1)) == ((0, 16), (16, 32), (32, 48))
    assert second.say(m.LeaseProgress(0, 1, (0, 20)))[0] == m.Done()
    assert remaining(first) == [(0, 16), (20, 96)]
    assert first.say(m.RemainingRequest(0, 2))[0] == m.Remaining(None)


def test_a_waiting_worker_is_told_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_WAIT_S", 0.01)
    first, second = team(opened(plan("async")))
    whole = [(0, 4)]
    lease(first, whole=whole)
    assert lease(second, whole=whole) is None
    assert lease(second, whole=whole, waits=True) is None


def test_a_waiting_worker_is_woken_by_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_WAIT_S", 100.0)
    server = opened(plan("async"))
    first, second = team(server)
    whole = [(0, 4)]
    lease(first, whole=whole)

    def finish() -> None:
        with server._changed:
            server._changed.wait_for(lambda: server._membership.shard_queue.queue.waits_for(1), 20)
        first.say(m.LeaseProgress(0, 1, (0, 4)), lane="pull")

    reply, _ = together(lambda: lease(second, whole=whole, waits=True), finish)
    assert reply is None
    assert lease(second, whole=whole, waits=True) == (0, 0)


@pytest.mark.parametrize("how", ["leaves", "is lost"])
def test_leases_of_a_worker_that_is_gone_are_leased_again(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = opened(plan("async"))
    first, second = team(server)
    lease(first)
    lease(second)
    lease(first, 1, (0, 12))
    if how == "leaves":
        first.say(m.Leave())
    else:
        with server._changed:
            server._membership.shard_queue.lose(0)
    said = "has left" if how == "leaves" else "was lost"
    assert caplog.messages == [
        f"worker 0 {said} before it finished records 12 to 15 and 32 to 47 of epoch 0; other "
        "workers get them"
    ]
    assert [lease(second, n) for n in (1, 2)] == [(12, 16), (32, 48)]


def test_a_worker_that_finished_its_leases_leaves_silently(caplog: Any) -> None:
    first, _ = team(opened(plan("async")))
    lease(first)
    first.say(m.LeaseProgress(0, 1, (0, 16)))
    first.say(m.Leave())
    assert caplog.messages == []


@pytest.mark.slow
def test_a_deadlock_of_a_barrier_and_a_lease_is_an_error() -> None:
    server = opened(plan("async"))
    first, second = team(server)
    whole = [(0, 4)]
    lease(first, whole=whole)

    def wait() -> None:
        while isinstance(second.say(ask(whole=whole, waits=True), lane="pull")[0], m.Done):
            with server._changed:
                if server._membership.barriers._broken is not None:
                    return

    met, _ = together(lambda: first.enter_barrier(0, "save_persistables"), wait)
    assert isinstance(met, MembershipError)
    assert "save_persistables of worker 0 would wait for worker 1, which has no records" in str(met)
    assert "call it after the loop" in str(met)


# -- recovery after a restart ----------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    cluster = RestartableCluster(tmp_path / "kept", plan("async"))
    yield cluster
    cluster.close()


@pytest.mark.parametrize("snapshot", [False, True])
def test_leases_survive_a_restart(cluster: RestartableCluster, snapshot: bool) -> None:
    first, second = cluster.workers
    lease(first)
    lease(second)
    lease(first, 1, (0, 12))
    second.say(m.LeaseProgress(0, 1, (0, 20)))
    if snapshot:
        assert cluster.durability.snapshot()
    cluster.restart()
    first, second = cluster.workers
    assert remaining(first) == [(12, 16), (20, 96)]
    # the repeat of a lost reply, and the next lease
    assert [lease(first, n) for n in (1, 2)] == [(32, 48), (48, 60)]
    assert [lease(second, n) for n in (0, 1)] == [(16, 32), (60, 72)]


@pytest.mark.parametrize("how", ["leaves", "is lost", "gives back"])
@pytest.mark.parametrize("snapshot", [False, True])
def test_released_leases_survive_a_restart(
    cluster: RestartableCluster, how: str, snapshot: bool
) -> None:
    first, second = cluster.workers
    lease(first)
    lease(second)
    if how == "leaves":
        first.say(m.Leave())
    elif how == "gives back":
        first.say(m.LeaseProgress(0, 1, (0, 0), gives_back=True))
    else:
        with cluster.server._changed:
            # one record says both
            cluster.server._membership._note_gone(0, lost=True)
            cluster.server._membership.shard_queue.lose(0)
        cluster.server._log.wait_on_disk()
    if snapshot:
        assert cluster.durability.snapshot()
    with cluster.server._changed:
        before = cluster.server._membership.shard_queue.queue.state()
    cluster.restart(returning=[1])
    with cluster.server._changed:
        assert cluster.server._membership.shard_queue.queue.state() == before
    assert lease(cluster.workers[0], 1) == (0, 16)


def test_a_server_that_dies_while_it_gives_up_a_worker_frees_its_leases(
    cluster: RestartableCluster,
) -> None:
    first, second = cluster.workers
    lease(first)
    lease(second)
    # the record of the loss is the last one on disk
    cluster.server._membership._note_gone(0, lost=True)
    cluster.server._log.wait_on_disk()
    cluster.restart(returning=[1])
    assert lease(cluster.workers[0], 1) == (0, 16)


@pytest.mark.parametrize("how", ["leaves", "fails", "is lost"])
def test_a_lease_during_the_loss_of_a_worker_survives_a_restart(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = RestartableCluster(tmp_path / "kept", plan("async", lost_worker="go_on"))
    server, (first, second) = cluster.server, cluster.workers
    lease(second)
    lease(second, 1)
    reply: list[Any] = []
    wait_on_disk = server._log.wait_on_disk

    def lease_once() -> None:
        if not reply:
            reply.append(None)
            reply.append(lease(first))
        wait_on_disk()

    monkeypatch.setattr(server._log, "wait_on_disk", lease_once)
    if how == "is lost":
        second.disconnect()
        server._membership._look()
    else:
        second.say(m.Leave("an error" if how == "fails" else ""))
    assert reply[1] == (0, 16)
    with server._changed:
        before = server._membership.shard_queue.queue.state()
    cluster.restart(returning=[0])
    with cluster.server._changed:
        assert cluster.server._membership.shard_queue.queue.state() == before
    cluster.close()


def test_workers_of_another_job_start_from_the_first_range(tmp_path: Path) -> None:
    cluster = RestartableCluster(tmp_path, plan("async", workers=1))
    lease(cluster.workers[0])
    cluster.workers[0].say(m.Leave("an error"))
    cluster.server.close()
    server = closed_server(1)
    open_up(server, plan("async", workers=1), Durable(tmp_path, job="another", resume=True))
    assert lease(Worker(server, 0, 1)) == (0, 16)
    server.close()


OPERATIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 1), st.integers(0, 3)),
    st.tuples(st.just("reach"), st.integers(0, 1), st.booleans()),
    st.tuples(st.sampled_from(["die", "snapshot"])),
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.lists(OPERATIONS, max_size=15))
def test_any_history_of_leases_survives_restarts(
    tmp_path_factory: pytest.TempPathFactory, operations: list[Any]
) -> None:
    cluster = RestartableCluster(tmp_path_factory.mktemp("kept"), plan("async"))
    received = [0, 0]
    for name, *arguments in operations:
        if name == "ask":
            worker, number = arguments
            reply = lease(
                cluster.workers[worker], min(number, received[worker]), batches=1 + number
            )
            received[worker] += reply not in (None, (0, 0)) and number >= received[worker]
        elif name == "reach":
            worker, gives_back = arguments
            reached = max(0, received[worker] - 1), 0
            cluster.workers[worker].say(m.LeaseProgress(0, 1, reached, gives_back))
        elif name == "snapshot":
            assert cluster.durability.snapshot()
        else:
            before = cluster.server._membership.shard_queue.queue.state()
            cluster.restart()
            assert cluster.server._membership.shard_queue.queue.state().turns == before.turns
    cluster.close()
