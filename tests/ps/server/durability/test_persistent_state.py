# SPDX-License-Identifier: Apache-2.0
"""PersistentState: what a server records about workers applies to these workers only."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.ps.restartable import RestartableCluster
from tests.ps.serving import Worker, ask, closed_server, open_up, opened, plan, together

from fleetlight.ps import messages as m
from fleetlight.ps.plan import EntryPlan
from fleetlight.ps.server.durability.durability import Durable
from fleetlight.ps.server.server import Server
from fleetlight.ps.server.workers.roster import HERE

PLAN = plan("async", workers=1)


def leave_state_of_an_earlier_job(folder: Path) -> None:
    """The state of a job whose worker has pushed, passed barriers, leased records and left."""
    cluster = RestartableCluster(folder, PLAN)
    worker = cluster.workers[0]
    worker.push(0, {0: ([1], [1])}, phase=3)
    for barrier in (1, 2, 3):
        worker.enter_barrier(barrier, "barrier")
    worker.say(ask())
    worker.say(m.Leave())
    cluster.durability._over.set()
    cluster.server._roster._fail("so that all is kept")
    cluster.server.close()


@pytest.mark.parametrize("snapshots", [False, True])
def test_a_repeated_shrink_counts_once(tmp_path: Path, snapshots: bool) -> None:
    entry = EntryPlan("count", 2.0)
    tables = [msgspec.structs.replace(table, entry=entry) for table in PLAN.tables]
    counting = plan("async", workers=1, tables=tables)
    cluster, reference = RestartableCluster(tmp_path, counting), Worker(opened(counting), 0, 1)
    for id_ in (1, 1, 1, 2):
        cluster.workers[0].pull(0, [id_])
        reference.pull(0, [id_])
    days = [m.Shrink(0, 0, 0.1, 0.5, number) for number in (7, 8, 9)]
    replies = [reference.say(day) for day in days]
    for day, once in zip(days, replies, strict=True):
        assert cluster.workers[0].say(day) == once
        assert cluster.workers[0].say(day) == once
        if snapshots:
            assert cluster.durability.snapshot()
        cluster.restart(returning=[0])
        assert cluster.workers[0].say(day) == once
    cluster.workers[0].say(m.Leave("an error"))
    cluster.server.close()
    # workers of another job number their calls from the start
    restarted = closed_server(1)
    open_up(restarted, counting, Durable(tmp_path, job="another", resume=True))
    assert restarted._service is not None
    assert restarted._service.state.shrunk() == []
    restarted.close()


def resumed(folder: Path, server: Server) -> Server:
    open_up(server, PLAN, Durable(folder, job="another", resume=True))
    return server


def test_barriers_before_the_server_resumes_belong_to_the_new_job(tmp_path: Path) -> None:
    leave_state_of_an_earlier_job(tmp_path)
    server = closed_server(1)
    worker = Worker(server, 0, 1)
    worker.enter_barrier(1, "barrier")
    resumed(tmp_path, server)
    last = server._membership.barriers.last
    assert last is not None
    assert (last[0], server._roster.in_state(HERE)) == (1, [0])
    worker.enter_barrier(2, "barrier")
    assert worker.pull(0, [1]) == [-1]
    server.close()


def test_a_restart_forgets_workers_of_an_earlier_job(tmp_path: Path) -> None:
    leave_state_of_an_earlier_job(tmp_path)
    server = resumed(tmp_path, closed_server(1))
    worker = Worker(server, 0, 1)
    worker.enter_barrier(1, "barrier")
    worker.push(0, {0: ([1], [1])})
    server._roster._fail("so that all is kept")
    server.close()
    restarted = resumed(tmp_path, closed_server(1))
    assert restarted._membership.barriers.last is not None
    assert restarted._membership.barriers.last[0] == 1
    assert restarted._membership.shard_queue.queue.state().turns == []
    assert restarted._service is not None
    assert restarted._service.pushes.progress.clocks.state()[0] == {0: (0, 1)}
    assert Worker(restarted, 0, 1).pull(0, [1]) == [-2]
    restarted.close()


@pytest.mark.parametrize("snapshot", [True, False])
def test_without_a_log_held_gradients_are_lost(tmp_path: Path, snapshot: bool) -> None:
    """All changes since the last snapshot are lost; the workers continue."""
    cluster = RestartableCluster(tmp_path, plan("sync"), log=False)
    together(*(lambda w=w: w.push(0, {0: ([1], [4])}) for w in cluster.workers))
    if not snapshot:
        assert cluster.durability.snapshot()
    held = [worker.push_request(1, {0: None}, None, hold=True) for worker in cluster.workers]
    cluster.send(held, {0: ([1], [4])})
    if snapshot:
        assert cluster.durability.snapshot()
    cluster.restart()
    first, second = cluster.workers
    replies = together(*(lambda w=w: w.apply(1, 0.5) for w in cluster.workers))
    assert [reply.applied for reply, _ in replies] == [True, True]
    first.sequence -= 1
    reply, _ = first.apply(1, 0.5)
    assert reply.applied
    assert first.pull(0, [1]) == [-4]
    replies = together(
        lambda: first.push(2, {0: ([1], [1])}), lambda: second.push(2, {0: ([1], [1])})
    )
    assert all(reply.applied for reply, _ in replies)
    assert first.pull(0, [1]) == [-5]
    held = [worker.push_request(3, {0: None}, None, hold=True) for worker in cluster.workers]
    cluster.send(held, {0: ([1], [4])})
    together(*(lambda w=w: w.apply(3, 0.5) for w in cluster.workers))
    assert first.pull(0, [1]) == [-7]
    cluster.close()
