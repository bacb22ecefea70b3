# SPDX-License-Identifier: Apache-2.0
"""Workers and the server: they connect, beat, leave, are lost and return."""

import math
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.errors import refuses
from tests.ps.restartable import RestartableCluster
from tests.ps.serving import (
    OPTIONS,
    Worker,
    ask,
    closed_server,
    hello,
    ids_of,
    of_all,
    open_up,
    opened,
    plan,
    rows_of,
    team,
    together,
)

from fleetlight.errors import (
    CheckpointError,
    DeadlineError,
    JournalError,
    MembershipError,
    PeerLostError,
    StoppedError,
)
from fleetlight.launch.processes import watch
from fleetlight.ps import messages as m
from fleetlight.ps.journal.folder import remains
from fleetlight.ps.plan import Plan
from fleetlight.ps.resume import OVER
from fleetlight.ps.server.durability.durability import Durability, Durable
from fleetlight.ps.server.server import Server
from fleetlight.ps.server.steps.pushes import PushHandler
from fleetlight.ps.server.workers import presence
from fleetlight.ps.server.workers.roster import ABSENT, AWAY, HERE, LOST
from fleetlight.ps.transport import Connection, Listener, SocketChannel
from fleetlight.wire.control_signals import ControlSignal

# Membership: workers arrive, enter barriers, leave or are lost, and errors name them.


def test_workers_enter_a_barrier_before_the_plan_is_known() -> None:
    first, second = team(closed_server())
    replies = of_all([first, second], lambda w: w.enter_barrier(0, "init", 3 + w.index))
    assert [[list(array) for array in reply] for reply in replies] == [[[3], [4]]] * 2


def test_a_barrier_timeout_names_a_worker_that_never_connected() -> None:
    first = Worker(opened(plan(), deadline_s=0.05), 0)
    with refuses(DeadlineError, "barrier waited 0.03 s for worker 1", "it never connected"):
        first.enter_barrier(0, "barrier", deadline_s=0.03)


@pytest.mark.slow
def test_a_timeout_tells_where_the_missing_worker_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    server = opened(plan("async"), deadline_s=0.3)
    first, second = team(server)
    second.say(m.Heartbeat(41))
    first.push(0)
    with pytest.raises(DeadlineError, match=r"worker 1 \(silent for \d+ s, last at step 41\)"):
        first.pull(0, [1], at_least=1)
    in_barrier, barrier = threading.Event(), server._membership.barrier

    def notify(*of: Any) -> Any:
        in_barrier.set()
        return barrier(*of)

    def pull() -> list[float]:
        assert in_barrier.wait(60)
        try:
            return first.pull(0, [1], at_least=1)
        finally:
            server.refuse()

    monkeypatch.setattr(server._membership, "barrier", notify)
    replies = together(pull, lambda: second.enter_barrier(0, "auc", deadline_s=60.0))
    assert isinstance(replies[0], DeadlineError)
    assert "every worker waited 0.3 s for worker 1 (it is in auc)" in str(replies[0])


@pytest.mark.slow
@pytest.mark.parametrize("clips", [True, False])
def test_a_deadlock_of_a_barrier_and_a_step_is_an_error(clips: bool) -> None:
    server = opened(plan(workers=3))
    workers = team(server, 3)
    begin, *_ = of_all(workers, lambda w: w.push(0, hold=clips))
    assert isinstance(begin, tuple)
    met, stepped, left = together(
        lambda: workers[0].enter_barrier(0, "metrics.sum"),
        lambda: workers[1].apply(0, 1.0) if clips else workers[1].push(1),
        lambda: leave_after_broken_barrier(server, workers[0]),
    )
    assert isinstance(met, MembershipError)
    assert "metrics.sum of worker 0 would wait for worker 1" in str(met)
    assert "fleet.barrier_worker() first" in str(met)
    assert "worker 0 failed: uneven" in str(stepped)
    # a worker that enters the barrier later gets the error, too
    with pytest.raises(PeerLostError):
        workers[2].enter_barrier(0, "metrics.sum")
    assert left is None


def leave_after_broken_barrier(server: Server, worker: Worker) -> None:
    """Leave with an error, as a worker does after a failed barrier."""
    with server._changed:
        assert server._changed.wait_for(lambda: server._membership.barriers._broken is not None, 20)
    worker.say(m.Leave("uneven"), lane="pull")


def test_a_barrier_waits_for_workers_that_still_make_steps() -> None:
    workers = team(opened(plan(workers=3)), 3)
    workers[0].say(m.EndPhase(0))

    def last(worker: Worker) -> Any:
        worker.push(0)
        worker.say(m.EndPhase(0))
        return worker.enter_barrier(0, "barrier", worker.index)

    met = together(
        lambda: workers[0].enter_barrier(0, "barrier"),
        lambda: last(workers[1]),
        lambda: last(workers[2]),
    )
    assert [[int(array[0]) for array in each] for each in met] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("operation", ["push", "meet", "pull"])
def test_a_lost_worker_fails_every_waiting_request(operation: str) -> None:
    first, second = team(opened(plan("sync" if operation == "push" else "async")))
    waits = {
        "push": lambda: first.push(0),
        "meet": lambda: first.enter_barrier(0, "barrier"),
        "pull": lambda: first.pull(0, [1], at_least=1),
    }
    lost, _ = together(waits[operation], second.disconnect)
    assert isinstance(lost, PeerLostError)
    assert "worker 1 disconnected without goodbye" in str(lost)
    # later calls fail, too
    for call in (*waits.values(), lambda: first.say(m.Heartbeat(0))):
        with pytest.raises(PeerLostError, match="worker 1 disconnected"):
            call()
    first.leave()


def test_peers_receive_the_error_of_a_failed_worker() -> None:
    server = opened(plan())
    first, second = team(server)
    lost, _ = together(lambda: first.push(0), lambda: second.say(m.Leave("ValueError: boom")))
    assert isinstance(lost, PeerLostError)
    assert "worker 1 failed: ValueError: boom" in str(lost)
    second.disconnect()
    first.leave()
    with pytest.raises(PeerLostError, match="worker 1 failed: ValueError: boom"):
        server.wait()


def test_a_worker_that_joins_after_a_failure_receives_it() -> None:
    server = opened(plan())
    Worker(server, 1).disconnect()
    late = Worker(server, 0)
    with pytest.raises(PeerLostError, match="worker 1 disconnected"):
        late.say(m.Join(plan()))


def test_a_worker_whose_socket_closes_is_lost() -> None:
    server = opened(plan())
    listener = Listener(("127.0.0.1", 0), server)
    try:
        first, second = (
            SocketChannel.connect(
                listener.address, "server 0", deadline_s=20, greeting=partial(hello, n, "control")
            )
            for n in range(2)
        )
        first.send(m.Barrier(0, "barrier", 20.0))
        second.close()
        with refuses(PeerLostError, "server 0 ", "worker 1 disconnected without goodbye"):
            first.receive()
        first.call(m.Leave())
        with pytest.raises(PeerLostError, match="worker 1 disconnected"):
            server.wait()
        first.close()
    finally:
        listener.stop()


@pytest.mark.parametrize("last", ["control", "push", "pull"])
def test_a_worker_is_present_while_any_of_its_connections_is_open(last: str) -> None:
    server = opened(plan("async"))
    first, second = team(server)
    second.disconnect(*({"control", "push", "pull"} - {last}))
    assert first.pull(0, [1]) == [0]
    # the worker reconnects before the server notices the end of the old connection
    old, second.lanes[last] = second.lanes[last], Connection("again")
    second.greet(last)
    server.gone(old, None)
    assert first.pull(0, [1]) == [0]
    second.disconnect(last)
    with pytest.raises(PeerLostError, match="worker 1 disconnected without goodbye"):
        first.pull(0, [1], at_least=1)


def test_the_end_of_a_process_is_noticed_while_its_request_waits() -> None:
    """The server does not read from a connection whose request is in progress."""
    server = opened(plan(), deadline_s=100.0)
    Worker(server, 0)
    listener = Listener(("127.0.0.1", 0), server)
    control, push = (
        SocketChannel.connect(
            listener.address, "server 0", deadline_s=20, greeting=partial(hello, 1, lane)
        )
        for lane in ("control", "push")
    )
    try:
        push.send(m.Push(0, 0, 0, 0, 0, OPTIONS, [], dense=False))
        with server._changed:
            # the arrival of a request notifies no waiter
            while not server._changed.wait_for(
                lambda: server._serving().pushes.awaited_by(1), 0.01
            ):
                pass
        for channel in (push, control):
            channel.close()
        with server._changed:
            assert server._changed.wait_for(lambda: server._roster.in_state(LOST) == [1], 20)
    finally:
        listener.stop()


def test_the_end_of_a_process_is_noticed_when_one_lane_closes_late() -> None:
    server = opened(plan("async"))
    first, second = team(server)
    has_ended = threading.Event()
    second.lanes["push"] = Connection("push", has_ended=has_ended.is_set)
    second.greet("push")

    def end() -> None:
        for connection in set(second.greeted) - {second.lanes["push"]}:
            server.gone(connection, None)
        assert server._roster.in_state(HERE) == [0, 1]
        has_ended.set()
        with pytest.raises(PeerLostError, match="worker 1 disconnected without goodbye"):
            first.enter_barrier(0, "barrier")
        first.leave()

    lost, ended = together(server.wait, end)
    assert "worker 1 disconnected without goodbye: its connection was closed" in str(lost)
    assert ended is None


def test_a_silent_worker_that_calls_again_is_present() -> None:
    server = opened(plan("async"))
    _, second = team(server)
    second.greet_again("control", 1)
    with server._changed:
        server._presence.lose(1, "it has been silent for 20 s")
    assert server._roster.in_state(AWAY) == [1]
    second.say(m.Heartbeat(3), lane="push")
    assert server._roster.in_state(HERE) == [0, 1]


def test_a_barrier_fails_at_once_if_a_worker_has_left() -> None:
    first, second = team(opened(plan()))
    second.leave()
    with pytest.raises(MembershipError, match="barrier would wait for worker 1, which has left"):
        first.enter_barrier(0, "barrier")


@pytest.mark.parametrize("lost_worker", ["fail", "go_on"])
@pytest.mark.parametrize("word", [m.Heartbeat(3, stops=True), m.Leave(stopped=True)], ids=str)
def test_a_barrier_fails_at_once_if_a_worker_stops(word: m.Message, lost_worker: str) -> None:
    server = opened(plan(lost_worker=lost_worker))
    first, second = team(server)

    def enter_barrier() -> None:
        with pytest.raises(StoppedError, match="barrier would wait for worker 1, which stops"):
            first.enter_barrier(0, "barrier")

    def stop() -> None:
        while not server._presence._activities[0].doing:
            pass
        second.say(word)

    together(enter_barrier, stop)


def test_a_worker_that_enters_a_timed_out_barrier_gets_its_error() -> None:
    first, second = team(opened(plan()))
    with pytest.raises(DeadlineError):
        first.enter_barrier(0, "save", deadline_s=0.02)
    with pytest.raises(DeadlineError, match=r"save waited 0\.02 s for worker 1"):
        second.enter_barrier(0, "save")


def test_the_server_ends_after_all_workers_leave() -> None:
    server = opened(plan())
    first, second = team(server)
    ended, *_ = together(server.wait, lambda: first.leave(), lambda: second.leave())
    assert ended is None
    with pytest.raises(MembershipError, match="returned after it had left"):
        Worker(server, 0)


def test_the_server_stays_until_the_goodbye_is_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "_LINGER_S", 60.0)
    server = opened(plan())
    first, second = team(server)
    first.leave()
    second.say(m.Leave())
    waiting = threading.Thread(target=server.wait, daemon=True)
    waiting.start()
    # the reply was lost with its connection, so the worker repeats the request
    second.disconnect()
    again = Connection("control")
    joined = msgspec.structs.replace(hello(1, "control"), joined=True)
    for message in (joined, m.Leave(), m.GoodbyeAck()):
        assert waiting.is_alive()
        server(again, message, [])
    waiting.join(20)
    assert not waiting.is_alive()


@pytest.mark.parametrize("acknowledges_early", [True, False])
def test_the_wait_for_the_acknowledgement_is_bounded(
    acknowledges_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = opened(plan())
    first, second = team(server)
    if acknowledges_early:
        # before its goodbye an acknowledgement has no effect
        second.say(m.GoodbyeAck())
    second.say(m.Leave())
    first.leave()
    now = time.monotonic()
    assert server._roster.unconfirmed_since() <= now
    monkeypatch.setattr(server._presence, "_clock", lambda: now + presence._LINGER_S + 0.1)
    server.wait()


def test_the_launcher_waits_longer_than_the_server() -> None:
    """A server killed earlier keeps its state, or a worker is restarted for nothing."""
    longest = presence._LINGER_S + presence._LOOK_EVERY_S
    assert longest + 1.0 < min(watch.LEAVE_S, watch.GOODBYE_S)


def test_a_server_timeout_names_a_worker_that_never_connected() -> None:
    server = closed_server(deadline_s=0.5)
    Worker(server, 0)
    with (
        # so its silence is no error
        server._presence.during(0, "a test"),
        pytest.raises(DeadlineError, match=r"the server waited 0\.5 s for worker 1 \(it never"),
    ):
        server.wait()


def test_the_server_loses_a_silent_worker() -> None:
    server = closed_server(1, deadline_s=0.05)
    Worker(server, 0, 1)
    with refuses(PeerLostError, "worker 0 disconnected without goodbye: it has been sil"):
        server.wait()


@pytest.mark.slow
def test_other_workers_continue_without_a_lost_worker() -> None:
    server = opened(plan("sync", lost_worker="go_on"))
    first, second = team(server)

    def wait() -> None:
        server.wait()

    def train() -> float:
        second.disconnect()
        first.push(0, {0: ([7], [-2.0])})
        assert [list(array) for array in first.enter_barrier(0, "barrier", 3)] == [[3]]
        row = first.pull(0, [7])[0]
        first.leave()
        return row

    row, _ = together(train, wait)
    assert row == 2.0


def test_a_nan_deadline_expires_at_once() -> None:
    first, _ = team(opened(plan()))
    with pytest.raises(DeadlineError, match="barrier waited nan s for worker 1"):
        first.enter_barrier(1, "barrier", deadline_s=float("nan"))


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_a_worker_taken_for_lost_cannot_write(mode: str) -> None:
    server = opened(plan(mode, lost_worker="go_on"))
    first, second = team(server)
    second.disconnect()

    def write() -> None:
        if mode == "geo":
            exchange = m.GeoExchange(0, 0, 0, [0], False)
            second.say(exchange, ids_of([7]), rows_of([1]), lane="push")
        else:
            second.push(0, {0: ([7], [-1.0])})

    def train() -> None:
        # returns when worker 1 is lost
        first.enter_barrier(0, "barrier")
        with pytest.raises(MembershipError, match="worker 1 has left the job or was lo"):
            write()
        with pytest.raises(MembershipError, match="the server refuses its pushes"):
            second.say(ask())
        assert first.pull(0, [7]) == [0.0]
        first.leave()

    assert together(train, server.wait) == [None, None]


def test_a_stop_signal_survives_a_concurrent_save_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler runs between any two operations."""
    server = opened(plan(workers=1))
    worker = Worker(server, 0, 1)
    add = ControlSignal.__or__

    def or_during_signal(left: ControlSignal, right: ControlSignal) -> ControlSignal:
        monkeypatch.setattr(ControlSignal, "__or__", add)
        server.call_stop()
        return left | right

    monkeypatch.setattr(ControlSignal, "__or__", or_during_signal)
    worker.say(m.Heartbeat(0, ControlSignal(saves=1)))
    assert worker.say(m.Heartbeat(0))[0].call == ControlSignal(stop=True, saves=1)


# A restarted server knows which workers arrived, left or were lost.


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


# A server starts from a checkpoint or from its own durable state, never from both.


PLAN = plan("async", workers=1)


def checkpoint() -> Iterator[Any]:
    """A row and dense values."""
    dense = np.array([7, 8, 9], np.float32)
    yield m.Fill([0], True, loaded=True), [ids_of([1]), rows_of([5]), dense]


def missing_checkpoint() -> Iterator[Any]:
    """A checkpoint that has been removed."""
    raise CheckpointError("there is no checkpoint")
    yield


def started(folder: Path, loaded: Any, *, job: str = "a job", **more: Any) -> Server:
    server = closed_server(1)
    open_up(server, PLAN, Durable(folder, job=job, **more), loaded)
    return server


def crash(durability: Durability) -> None:
    """Crash, as `RestartableCluster.restart` does."""
    durability._over.set()
    if durability._snapshots.is_alive():
        durability._snapshots.join()
    durability._folder._lock.release()


def values(server: Server) -> tuple[list[float], list[float]]:
    worker = Worker(server, 0, 1)
    return worker.pull(0, [1], insert=False), worker.dense()


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("job", ["a job", "another"])
def test_a_restarted_server_does_not_read_the_checkpoint_again(
    tmp_path: Path, job: str, log: bool
) -> None:
    first = started(tmp_path, checkpoint, log=log)
    Worker(first, 0, 1).push(0, {0: ([1], [1])}, [1, 1, 1])
    assert first._durability is not None
    crash(first._durability)
    # by now the checkpoint may contain later pushes, or be deleted
    restarted = started(tmp_path, missing_checkpoint, job=job, log=log, resume=job != "a job")
    assert values(restarted) == (([4], [6, 7, 8]) if log else ([5], [7, 8, 9]))
    restarted.close()


def test_a_log_without_snapshot_outranks_the_checkpoint(tmp_path: Path) -> None:
    first = RestartableCluster(tmp_path, PLAN)
    first.workers[0].push(0, {0: ([1], [1])}, [1, 1, 1])
    crash(first.durability)
    restarted = started(tmp_path, missing_checkpoint, job="another", resume=True)
    assert values(restarted) == ([-1], [0, 0, 0])
    restarted.close()


@pytest.mark.parametrize("job", ["a job", "another"])
def test_a_crash_before_the_first_snapshot_reads_the_checkpoint_again(
    tmp_path: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed: list[Durability] = []

    def crash_in_snapshot(durability: Durability, *_: object) -> bool:
        crashed.append(durability)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Durability, "snapshot", crash_in_snapshot)
        with pytest.raises(KeyboardInterrupt):
            started(tmp_path, checkpoint)
    crash(crashed[0])
    # no reply depends on the lost state, so a new job may start and the same job may resume
    how = {} if job == "a job" else {"resume": True, "must_exist": True}
    restarted = started(tmp_path, checkpoint, job=job, **how)
    assert values(restarted) == ([5], [7, 8, 9])
    assert restarted._durability is not None
    assert restarted._durability.incarnation == 1
    restarted.close()


def test_an_unreadable_checkpoint_leaves_no_state(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        started(tmp_path, missing_checkpoint)
    with pytest.raises(JournalError, match="has no state to resume from"):
        started(tmp_path, checkpoint, job="another", resume=True, must_exist=True)
    server = started(tmp_path, checkpoint, job="another")
    assert values(server) == ([5], [7, 8, 9])
    server.close()


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_initial_values_do_not_replace_trained_values(tmp_path: Path, mode: str, log: bool) -> None:
    """A job that resumes the state of an earlier job sends its initial values like any job."""
    first = RestartableCluster(tmp_path, plan(mode, workers=1), log=log)
    initial = [ids_of([1, 9]), rows_of([5, 6]), np.array([7, 8, 9], np.float32)]
    first.workers[0].say(m.Fill([1], True), *initial)
    if mode == "geo":
        difference = [ids_of([1]), rows_of([-1]), np.array([-1, -1, -1], np.float32)]
        first.workers[0].say(m.GeoExchange(0, 0, 0, [1], dense=True), *difference, lane="push")
    else:
        first.workers[0].push(0, {1: ([1], [1])}, [1, 1, 1])
    if not log:
        assert first.durability.snapshot()
    first.workers[0].say(m.Leave("an error"))
    first.server.close()
    for job in ("another", "a third"):
        restarted = closed_server(1)
        open_up(restarted, first.plan, Durable(tmp_path, log=log, job=job, resume=True))
        worker = Worker(restarted, 0, 1)
        for _ in range(2):
            worker.say(m.Fill([1], True), ids_of([1, 9]), rows_of([0, 0]), np.zeros(3, np.float32))
        assert worker.pull(1, [1, 9], insert=False) == [4, 6]
        assert worker.dense() == [6, 7, 8]
        worker.say(m.Leave("an error"))
        restarted.close()


def test_a_server_that_crashed_without_values_accepts_initial_values(tmp_path: Path) -> None:
    RestartableCluster(tmp_path, plan("async")).close()
    server = closed_server()
    open_up(server, plan("async"), Durable(tmp_path, job="another", resume=True))
    worker = Worker(server, 0)
    worker.say(m.Fill([], True), np.array([7, 8, 9], np.float32))
    assert worker.dense() == [7, 8, 9]
    server.close()
