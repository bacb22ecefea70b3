# SPDX-License-Identifier: Apache-2.0
"""A restarted server knows which workers arrived, left or were lost."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.ps.restartable import RestartableCluster
from tests.ps.serving import Worker, closed_server, open_up, plan, together

from fleetlight.errors import MembershipError
from fleetlight.ps import messages as m
from fleetlight.ps.journal.folder import remains
from fleetlight.ps.plan import Plan
from fleetlight.ps.resume import OVER
from fleetlight.ps.server.durability.durability import Durability, Durable
from fleetlight.ps.server.steps.pushes import PushHandler
from fleetlight.ps.server.workers import presence
from fleetlight.ps.server.workers.roster import ABSENT, LOST


@pytest.fixture
def make_cluster(tmp_path: Path) -> Any:
    clusters: list[RestartableCluster] = []

    def make(the_plan: Plan) -> RestartableCluster:
        clusters.append(RestartableCluster(tmp_path / "kept", the_plan))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


def test_a_worker_that_left_is_not_awaited_after_a_restart(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(plan("sync"))
    first, second = cluster.workers
    together(lambda: first.push(0), lambda: second.push(0))
    second.leave()
    server = cluster.server
    cluster.durability._over.set()
    cluster.durability._snapshots.join()
    cluster.durability._folder._lock.release()
    cluster.server = cluster._start()
    assert cluster.server is not server
    worker = Worker(cluster.server, 0)
    worker.sequence = first.sequence
    reply, _ = worker.push(1, {0: ([1], [3])})
    assert reply.applied
    # worker 1 may have lost the reply to its goodbye, so the server gives it time to repeat it
    later = time.monotonic() + presence._LINGER_S
    monkeypatch.setattr(cluster.server._presence, "_clock", lambda: later)
    worker.leave()
    cluster.server.wait()
    cluster.server.close()
    # a finished job leaves no state that would stop the next job
    assert {path.name for path in cluster.folder.iterdir()} == {"lock", "identity.json"}
    assert remains(cluster.folder).state == OVER


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("snapshot", [True, False])
def test_a_lost_worker_stays_lost_after_a_restart(make_cluster: Any, snapshot: bool) -> None:
    cluster = make_cluster(plan("sync", lost_worker="go_on"))
    cluster.workers[1].disconnect()
    cluster.server._membership._look()
    assert cluster.server._roster.in_state(LOST) == [1]
    if snapshot:
        assert cluster.durability.snapshot()
    cluster.restart(returning=[0])
    assert cluster.server._roster.in_state(LOST) == [1]
    with pytest.raises(MembershipError, match="worker 1 returned after it was lost"):
        Worker(cluster.server, 1)
    first = cluster.workers[0]
    assert first.push(0, {0: ([1], [3])})[0].applied
    assert [list(array) for array in first.enter_barrier(0, "barrier", 3)] == [[3]]
    first.leave()
    cluster.server.wait()


@pytest.mark.parametrize("snapshot", [True, False])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_does_not_reconnect_after_a_restart_is_lost(
    make_cluster: Any, mode: str, snapshot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(plan(mode, lost_worker="go_on"))
    if snapshot:
        assert cluster.durability.snapshot()
    # worker 1 also does not connect to the incarnation between
    cluster.restart(returning=[0])
    cluster.restart(returning=[0])
    assert cluster.server._roster.in_state(ABSENT) == [1]
    later = time.monotonic() + cluster.durable.away_s + 1.0
    monkeypatch.setattr(cluster.server._presence, "_clock", lambda: later)
    (first,) = cluster.workers
    first.say(m.Heartbeat(0))
    cluster.server._membership._look()
    assert cluster.server._roster.in_state(LOST) == [1]
    assert first.push(0, {0: ([1], [3])})[0].applied
    assert [list(array) for array in first.enter_barrier(0, "barrier", 3)] == [[3]]
    first.leave()
    cluster.server.wait()


def test_an_arrival_during_the_start_of_a_journal_is_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, durable = closed_server(), Durable(tmp_path / "kept", job="a job")
    put_baseline, arriving = (
        Durability._put_baseline,
        threading.Thread(target=Worker, args=(server, 1)),
    )

    def put_during_arrival(durability: Durability, *more: Any) -> None:
        put_baseline(durability, *more)
        # the server admits the worker once it can log its changes
        arriving.start()

    with monkeypatch.context() as patch:
        patch.setattr(Durability, "_put_baseline", put_during_arrival)
        open_up(server, plan("async"), durable)
    arriving.join()
    Worker(server, 0).push(0, {0: ([1], [3])})
    server.close()
    worker = closed_server()
    open_up(worker, plan("async"), durable)
    assert worker._roster.in_state(ABSENT) == [0, 1]
    assert worker._roster.overdue(math.inf) == [0, 1]
    worker.close()


def test_removing_a_worker_does_not_hold_the_lock_that_a_step_needs(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that this completes takes the values lock, which is ordered before `changed`."""
    cluster = make_cluster(plan("sync"))
    cluster.workers[1].leave()
    free: list[bool] = []
    leave = PushHandler.leave

    def observed(pushes: PushHandler, worker: int) -> None:
        def take() -> bool:
            taken = pushes._changed.acquire(blocking=False)
            if taken:
                pushes._changed.release()
            return taken

        free.extend(together(take))
        leave(pushes, worker)

    monkeypatch.setattr(PushHandler, "leave", observed)
    cluster.restart(returning=[0])
    # during recovery, and when the server opens
    assert free == [True, True]
