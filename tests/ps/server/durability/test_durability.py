# SPDX-License-Identifier: Apache-2.0
"""A server returns with the state that it had when it was killed."""

import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.errors import refuses
from tests.ps.restartable import IDS, RestartableCluster, rows
from tests.ps.serving import (
    Worker,
    ask,
    closed_server,
    ids_of,
    of_all,
    open_up,
    opened,
    plan,
    rows_of,
    team,
    together,
)

from fleetlight.errors import JournalError, MembershipError, PlanError, ProtocolError
from fleetlight.ps import messages as m
from fleetlight.ps.journal.segment import segments
from fleetlight.ps.plan import DensePlan, EntryPlan, RulePlan
from fleetlight.ps.server.durability import durability
from fleetlight.ps.server.durability.durability import Durable, Throttle
from fleetlight.ps.server.server import Server
from fleetlight.ps.server.workers.roster import HERE
from fleetlight.ps.transport.interface import Connection

# A server that crashes at any moment and restarts has lost no acknowledged change.


def counts(metrics: m.ServerMetrics) -> tuple[Any, ...]:
    """What a restart does not change."""
    return metrics.pushes, metrics.rows, metrics.nbytes, metrics.staleness


def test_rows_dense_values_and_metrics_survive_a_restart(make_cluster: Any) -> None:
    cluster = make_cluster(plan("async"))
    first, second = cluster.workers
    first.say(m.Fill([1], True), ids_of([1, 9]), rows_of([5, 6]), np.array([7, 8, 9], np.float32))
    first.push(0, {0: ([1, 2], [1, 2])}, [1, 2, 3])
    second.push(0, {0: ([2], [4])})
    before = counts(cluster.server.metrics())
    cluster.restart()
    first, second = cluster.workers
    assert first.pull(0, [1, 2], insert=False) == [-1, -6]
    assert first.pull(1, [1, 9], insert=False) == [5, 6]
    assert first.dense() == [6, 6, 6]
    assert counts(cluster.server.metrics()) == before
    # training continues
    second.push(1, {0: ([2], [1])})
    cluster.restart()
    assert cluster.workers[0].pull(0, [2], insert=False) == [-7]
    assert cluster.durability.incarnation == 3


@pytest.mark.parametrize("log", [True, False])
def test_reset_rows_survive_a_restart(make_cluster: Any, log: bool) -> None:
    """Rows of the loaded state are as in it; all others have their initial values."""
    cluster = make_cluster(plan("async"), log=log)
    worker = cluster.workers[0]
    first = worker.pull(0, [1, 2, 3], insert=True)
    worker.push(0, {0: ([1, 2], [4, 4])}, [1, 2, 3])
    assert worker.pull(0, [1, 2, 3], insert=False) != first
    worker.say(m.Fill([0], False, loaded=True, reset=True), ids_of([2]), rows_of([9]))
    cluster.restart()
    worker = cluster.workers[0]
    assert worker.pull(0, [1, 2, 3], insert=False) == [first[0], 9, first[2]]


def test_initial_values_survive_a_restart_without_a_log(make_cluster: Any) -> None:
    cluster = make_cluster(plan("sync"), log=False)
    values = ids_of([1, 9]), rows_of([5, 6]), np.array([7, 8, 9], np.float32)
    cluster.workers[0].say(m.Fill([1], True), *values)
    cluster.restart()
    assert cluster.workers[0].pull(1, [1, 9], insert=False) == [5, 6]
    assert cluster.workers[0].dense() == [7, 8, 9]


def test_an_acknowledged_push_is_not_applied_again(make_cluster: Any) -> None:
    cluster = make_cluster(plan("async"))
    worker = cluster.workers[0]
    message = worker.push_request(0, {0: None}, None)
    worker.send(message, {0: ([1], [1])}, None)
    cluster.restart()
    reply, _ = cluster.workers[0].send(message, {0: ([1], [1])}, None)
    assert reply.applied
    assert cluster.workers[0].pull(0, [1]) == [-1]


@pytest.mark.parametrize("more", [{"log": True}, {"log": False}])
@pytest.mark.parametrize("snapshots", [0, 1])
def test_a_restarted_server_refuses_replaced_workers(
    make_cluster: Any, more: dict[str, Any], snapshots: int
) -> None:
    cluster = make_cluster(plan("async"), **more)
    earlier_greeting, later_greeting = (
        m.Greeting("test", 0, 2, 0, 1, 1, "push", True, incarnation) for incarnation in (1, 2)
    )
    cluster.workers[0].say(later_greeting)
    for _ in range(snapshots):
        assert cluster.durability.snapshot()
    for _ in range(2):
        cluster.restart(returning=[1])
        with refuses(MembershipError, "worker 0 has been ", "but its incarnation 1 still"):
            cluster.server(Connection("the earlier incarnation"), earlier_greeting, [])
    cluster.server(Connection("the later incarnation"), later_greeting, [])


def test_a_push_with_a_torn_record_is_applied_again(make_cluster: Any) -> None:
    cluster = make_cluster(plan("async"))
    worker = cluster.workers[0]
    worker.push(0, {0: ([1], [1])})
    message = worker.push_request(1, {0: None}, None)
    worker.send(message, {0: ([1], [10])}, None)
    path = segments(cluster.folder)[-1][1]
    os.truncate(path, path.stat().st_size - 1)
    cluster.restart()
    assert cluster.workers[0].pull(0, [1]) == [-1]
    cluster.workers[0].send(message, {0: ([1], [10])}, None)
    assert cluster.workers[0].pull(0, [1]) == [-11]


def test_a_sync_step_is_applied_once_whichever_reply_was_lost(make_cluster: Any) -> None:
    cluster = make_cluster(plan("sync"))
    first, second = cluster.workers
    messages = [worker.push_request(0, {0: None}, None) for worker in (first, second)]
    gradients = {0: ([1], [2])}
    cluster.send(messages, gradients)
    cluster.restart()
    first, second = cluster.workers
    # worker 0 has its reply and continues, worker 1 repeats its push first
    reply, _ = second.send(messages[1], gradients, None)
    assert reply.applied
    replies = together(lambda: first.push(1, gradients), lambda: second.push(1, gradients))
    assert all(reply.applied for reply, _ in replies)
    assert rows(first)[IDS.index(1)] == -4


def test_a_step_after_a_restart_waits_for_all_workers(make_cluster: Any) -> None:
    cluster = make_cluster(plan("sync"))
    first, second = cluster.workers
    together(lambda: first.push(0, {0: ([1], [2])}), lambda: second.push(0))
    cluster.restart()
    first, second = cluster.workers
    together(lambda: first.push(1, {0: ([1], [2])}), lambda: second.push(1, {0: ([1], [4])}))
    assert first.pull(0, [1]) == [-4]


def test_a_skipped_step_stays_skipped(make_cluster: Any) -> None:
    cluster = make_cluster(plan("sync"))
    messages = [worker.push_request(0, {}, None, skip=True) for worker in cluster.workers]
    cluster.send(messages, {})
    cluster.restart()
    for worker, message in zip(cluster.workers, messages, strict=True):
        reply, _ = worker.send(message, {}, None)
        assert not reply.applied
    # the step number is used again
    first, second = cluster.workers
    replies = of_all([first, second], lambda w: w.push(0, {0: ([1], [2])}))
    assert [reply.applied for reply, _ in replies] == [True, True]


@pytest.mark.parametrize("when", ["held", "snapshot", "released"])
def test_held_gradients_survive_a_restart(make_cluster: Any, when: str) -> None:
    cluster = make_cluster(plan("sync"))
    held = [worker.push_request(0, {0: None}, None, hold=True) for worker in cluster.workers]
    squares = [reply.square for reply, _ in cluster.send(held, {0: ([1], [4])})]
    if when == "released":
        of_all(cluster.workers, lambda w: w.apply(0, 0.5))
    if when == "snapshot":
        assert cluster.durability.snapshot()
    cluster.restart()
    first, second = cluster.workers
    assert cluster.server._service is not None
    # the position from which a resuming worker continues
    known = cluster.server._service.pushes.last_push(0, 1)
    assert known == (first.sequence, int(when != "released"))
    if when == "held":
        # the repeat of a lost reply
        reply, _ = second.send(held[1], {0: ([1], [4])}, None)
        assert reply.square == squares[1]
    if when != "released":
        of_all(cluster.workers, lambda w: w.apply(0, 0.5))
    assert first.pull(0, [1]) == [-2]
    replies = of_all([first, second], lambda w: w.push(1, {0: ([1], [1])}))
    assert all(reply.applied for reply, _ in replies)


def test_a_completed_barrier_survives_a_restart(make_cluster: Any) -> None:
    cluster = make_cluster(plan("async"))
    first, second = cluster.workers
    of_all([first, second], lambda w: w.enter_barrier(0, "barrier", 3 + w.index))
    cluster.restart()
    # worker 1 lost its reply, worker 0 is at the next barrier
    first, second = cluster.workers
    assert [list(array) for array in second.enter_barrier(0, "barrier", 4)] == [[3], [4]]
    replies = of_all([first, second], lambda w: w.enter_barrier(1, "sum", 5 + w.index))
    assert [[list(array) for array in reply] for reply in replies] == [[[5], [6]]] * 2


def test_a_folder_in_use_is_refused(make_cluster: Any, tmp_path: Path) -> None:
    cluster = make_cluster(plan("async"))
    with pytest.raises(JournalError, match=r"in use by another process \(process "):
        RestartableCluster(cluster.folder, plan("async"))


def test_state_of_another_job_is_resumed_only_on_request(tmp_path: Path) -> None:
    RestartableCluster(tmp_path, plan("async")).close()
    for job in ("another", ""):
        with refuses(JournalError, "has the state of a job that did not finish", "resume that job"):
            open_up(closed_server(), plan("async"), Durable(tmp_path, job=job))
    server = closed_server()
    open_up(server, plan("async"), Durable(tmp_path, job="another", resume=True))
    server.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_another_job_may_resume_the_values(tmp_path: Path, mode: str) -> None:
    cluster = RestartableCluster(tmp_path, plan(mode, workers=1))
    cluster.workers[0].push(0, {0: ([1], [1])}, [1, 1, 1])
    cluster.workers[0].enter_barrier(1, "barrier")
    cluster.workers[0].say(m.EndPhase(0))
    cluster.workers[0].push(1, phase=1, hold=mode == "sync")
    cluster.workers[0].say(m.Leave("an error"))
    cluster.server.close()
    restarted = closed_server(1)
    open_up(restarted, plan(mode, workers=1), Durable(tmp_path, job="another", resume=True))
    worker = Worker(restarted, 0, 1)
    worker.enter_barrier(1, "barrier")
    reply, _ = worker.push(0, {0: ([1], [1])}, [1, 1, 1])
    assert reply.applied
    assert worker.pull(0, [1]) == [-2]
    assert worker.dense() == [-1, -1, -1]
    restarted.close()


def test_servers_start_empty_when_workers_do(tmp_path: Path) -> None:
    cluster = RestartableCluster(tmp_path, plan("async"))
    cluster.workers[0].push(0, {0: ([1], [1])})
    assert cluster.durability.snapshot()
    cluster.close()
    restarted = closed_server()
    open_up(restarted, plan("async"), Durable(tmp_path, job="a job", start=1))
    assert Worker(restarted, 0).pull(0, [1]) == [0]
    restarted.close()


USERS, ITEMS = plan().tables
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 7}, "seed: 7 here, 0 there"),
    "dim": (
        {"tables": [USERS, msgspec.structs.replace(ITEMS, dim=3)]},
        "tables[items].dim: 3 here, 2 there",
    ),
    "name": (
        {"tables": [msgspec.structs.replace(USERS, name="people"), ITEMS]},
        "tables[people]: 'present' here, 'absent' there",
    ),
    "one more table": (
        {"tables": [USERS, ITEMS, msgspec.structs.replace(ITEMS, name="shops")]},
        "tables[shops]: 'present' here, 'absent' there",
    ),
    "one table less": ({"tables": [USERS]}, "tables[items]: 'absent' here, 'present' there"),
    "rule": (
        {"tables": [USERS, msgspec.structs.replace(ITEMS, rule=RulePlan("adam", {}))]},
        "tables[items].rule.name: 'adam' here, 'sgd' there",
    ),
    "elements": (
        {"dense": [DensePlan("bias", (4,), "float32", 0, 0)]},
        "dense[bias].shape: (4,) here, (3,) there",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_different_plan_is_refused_with_the_difference(tmp_path: Path, other: str) -> None:
    cluster = RestartableCluster(tmp_path, plan("async"))
    cluster.workers[0].push(0, {0: ([1], [1])}, [1, 1, 1])
    cluster.close()
    facts, difference = OTHERS[other]
    durable = Durable(tmp_path, job="another", resume=True)
    text = f"was written by another script or with other settings: plan.{difference}; run the same"
    server = closed_server()
    with pytest.raises(PlanError, match=re.escape(text)):
        open_up(server, plan("async", **facts), durable)
    server.close()
    # the state is still there for the same script
    restarted = closed_server()
    open_up(restarted, plan("async"), durable)
    worker = Worker(restarted, 0)
    assert (worker.pull(0, [1]), worker.dense()) == ([-1], [0, 0, 0])
    restarted.close()


def test_a_damaged_journal_is_not_truncated(make_cluster: Any) -> None:
    cluster = make_cluster(plan("async"))
    for step in range(3):
        cluster.workers[0].push(step, {0: ([1], [1])})
    path = segments(cluster.folder)[0][1]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"is damaged at byte \d+: .*record \d+ follows it"):
        cluster.restart()


def test_a_repeated_geo_exchange_is_added_once(make_cluster: Any) -> None:
    cluster = make_cluster(plan("geo", k_steps=2))
    worker = cluster.workers[0]
    message = m.GeoExchange(0, 0, 1, [0], dense=True)
    arrays = [ids_of([1, 2]), rows_of([1, 2]), np.array([1, 1, 1], np.float32)]
    worker.say(message, *arrays, lane="push")
    cluster.restart()
    for _ in range(2):
        cluster.workers[0].say(message, *[a.copy() for a in arrays], lane="push")
    assert cluster.workers[0].pull(0, [1, 2]) == [1, 2]
    assert cluster.workers[0].dense() == [2, 2, 2]


def test_rows_created_by_a_pull_survive_a_restart(make_cluster: Any) -> None:
    cluster = make_cluster(plan("async"))
    cluster.workers[0].pull(0, [1, 2, 3])
    cluster.workers[0].pull(0, [9], insert=False)
    # rows may be logged later than they are read
    cluster.workers[0].push(0)
    cluster.restart()
    assert cluster.server.metrics().rows == {"users": 3, "items": 0}


@pytest.mark.slow
def test_admission_counts_and_shrinks_survive_a_restart(make_cluster: Any) -> None:
    """Pushes raise the score of an id and shrinks decay it; recovery keeps both."""
    entry = EntryPlan("count", 2.0)
    tables = [msgspec.structs.replace(table, entry=entry) for table in plan().tables]
    durable_cluster, other = (
        make_cluster(plan("async", tables=tables)),
        opened(plan("async", tables=tables)),
    )
    histories: list[list[Any]] = [[], []]
    for day in range(4):
        for worker, history in zip(
            (durable_cluster.workers[0], Worker(other, 0)), histories, strict=True
        ):
            worker.sequence = 2 * day
            worker.pull(0, IDS[: 8 - 2 * day])
            worker.pull(0, [1])
            worker.push(day, {0: (IDS, [1.0] * 8)})
            history.append(rows(worker))
            history.append(worker.say(m.Shrink(0, 1, 0.0, 0.5)))
        durable_cluster.restart()
    assert histories[0] == histories[1]
    # ids were admitted and removed
    assert len({str(cluster) for cluster in histories[1]}) > 4


@pytest.mark.slow
def test_a_loaded_checkpoint_survives_a_restart(make_cluster: Any, tmp_path: Path) -> None:
    cluster = make_cluster(plan("async"))
    worker = cluster.workers[0]
    worker.push(0, {0: ([1, 2], [1, 2])}, [1, 1, 1])
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "token").write_text("")
    saved, _ = worker.say(m.Save(str(folder), "token", 0))
    state, arrays = worker.say(m.FetchDense())
    worker.push(1, {0: ([1, 5], [7, 7])}, [9, 9, 9])
    worker.say(m.Load(str(folder), [(f.table, f.name) for f in saved.files], epoch=1))
    worker.say(m.RestoreDense(state.state, state.scalars), *arrays)
    shutil.rmtree(folder)
    cluster.restart()
    worker = cluster.workers[0]
    assert worker.pull(0, [1, 2, 5], insert=False) == [-1, -2, 0]
    assert worker.dense() == [0, 0, 0]
    with pytest.raises(ProtocolError, match="pushed for epoch 0"):
        worker.push(2)


OPERATIONS = st.one_of(
    st.tuples(
        st.just("push"),
        st.integers(0, 1),
        st.lists(st.tuples(st.sampled_from(IDS), st.integers(-4, 4)), max_size=4),
    ),
    st.tuples(st.sampled_from(["die", "again", "snapshot", "tear"])),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(OPERATIONS, max_size=25))
def test_any_history_applies_each_push_once(operations: list[Any]) -> None:
    """Pushes of integers, lost replies, torn records, snapshots and crashes."""
    expected = dict.fromkeys(IDS, 0)
    with tempfile.TemporaryDirectory() as folder:
        cluster = RestartableCluster(Path(folder), plan("async"))
        steps, last = [0, 0], None
        for name, *arguments in operations:
            if name == "push":
                worker, changes = arguments
                gradients = {0: ([i for i, _ in changes], [float(n) for _, n in changes])}
                message = cluster.workers[worker].push_request(steps[worker], gradients, None)
                last = worker, message, gradients
                cluster.workers[worker].send(message, gradients, None)
                steps[worker] += 1
                for i, n in changes:
                    expected[i] -= n
            elif name == "again" and last is not None:
                worker, message, gradients = last
                cluster.workers[worker].send(message, gradients, None)
            elif name == "snapshot":
                assert cluster.durability.snapshot()
            elif name == "tear":
                with segments(cluster.folder)[-1][1].open("ab") as file:
                    file.write(b"\xf1JNL torn")
                cluster.restart()
            elif name == "die":
                cluster.restart()
        assert rows(cluster.workers[0]) == list(expected.values())
        cluster.close()


def test_without_durability_nothing_is_written(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    team(opened(plan("async")))[0].push(0, {0: ([1], [1])})
    assert list(tmp_path.iterdir()) == []


# PersistentState: what a server records about workers applies to these workers only.


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
    of_all(cluster.workers, lambda w: w.push(0, {0: ([1], [4])}))
    if not snapshot:
        assert cluster.durability.snapshot()
    held = [worker.push_request(1, {0: None}, None, hold=True) for worker in cluster.workers]
    cluster.send(held, {0: ([1], [4])})
    if snapshot:
        assert cluster.durability.snapshot()
    cluster.restart()
    first, second = cluster.workers
    replies = of_all(cluster.workers, lambda w: w.apply(1, 0.5))
    assert [reply.applied for reply, _ in replies] == [True, True]
    first.sequence -= 1
    reply, _ = first.apply(1, 0.5)
    assert reply.applied
    assert first.pull(0, [1]) == [-4]
    replies = of_all([first, second], lambda w: w.push(2, {0: ([1], [1])}))
    assert all(reply.applied for reply, _ in replies)
    assert first.pull(0, [1]) == [-5]
    held = [worker.push_request(3, {0: None}, None, hold=True) for worker in cluster.workers]
    cluster.send(held, {0: ([1], [4])})
    of_all(cluster.workers, lambda w: w.apply(3, 0.5))
    assert first.pull(0, [1]) == [-7]
    cluster.close()


# Throttle: a task with a share of a tenth sleeps nine times as long as it worked.


class Clock:
    """CPU seconds of the thread, and the waits that the throttle asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.worked_s, self.waits, self.share = 0.0, list[float](), 0.1
        monkeypatch.setattr(time, "thread_time", lambda: self.worked_s)
        self.throttle = Throttle(lambda: self.share, self.waits.append)

    def work(self, seconds: float) -> None:
        self.worked_s += seconds
        self.throttle()


def test_it_sleeps_in_proportion_to_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.work(0.01)
    clock.work(0.02)
    assert clock.waits == pytest.approx([0.09, 0.18])
    clock.work(100.0)
    assert clock.waits[-1] == durability._MAX_REST_S


def test_short_pieces_of_work_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for _ in range(3):
        clock.work(0.0004)
    assert clock.waits == pytest.approx([9 * 0.0012])


@pytest.mark.parametrize("share", [1.0, 1.5])
def test_a_full_share_does_not_sleep(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    clock = Clock(monkeypatch)
    clock.share = share
    clock.work(0.5)
    clock.share = 0.1
    clock.work(0.01)
    # work at a full share is not slept for later
    assert clock.waits == pytest.approx([0.09])


def test_a_larger_share_sleeps_less(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for clock.share in (0.1, 0.5, 0.8):
        clock.work(0.04)
    assert clock.waits == pytest.approx([0.36, 0.04, 0.01])
