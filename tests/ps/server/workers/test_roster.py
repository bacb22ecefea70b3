# SPDX-License-Identifier: Apache-2.0
"""Workers as a server knows them."""

import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.errors import refuses
from tests.ps.serving import Worker, opened, plan, team, together

from fleetlight.errors import (
    DeadlineError,
    FleetError,
    MembershipError,
    PeerError,
    PeerLostError,
    ProtocolError,
    StoppedError,
)
from fleetlight.ps import messages as m
from fleetlight.ps.messages import Greeting
from fleetlight.ps.server.workers import presence
from fleetlight.ps.server.workers.barriers import Barriers
from fleetlight.ps.server.workers.presence import PresenceMonitor
from fleetlight.ps.server.workers.roster import ABSENT, AWAY, HERE, LEFT, LOST, Peer, Roster

# Roster: which workers may arrive, and what errors say about those that are gone.


def roster() -> Roster:
    return Roster(server=1, server_num=2, worker_num=2, version="0.1")


def hello(worker: int = 0, **facts: Any) -> Greeting:
    usual: dict[str, Any] = {
        "fleetlight": "0.1", "worker_num": 2, "server": 1, "server_num": 2,
        "started_at": 5, "lane": "control",
    }  # fmt: skip
    return Greeting(worker=worker, **{**usual, **facts})


def elastic_hello(worker: int = 1, **facts: Any) -> Greeting:
    return hello(worker, **{"worker_max": 3, **facts})


def test_workers_arrive_and_leave() -> None:
    workers = roster()
    assert workers.in_state(ABSENT) == [0, 1]
    workers.arrive(hello(0))
    workers.arrive(hello(0, lane="push"))
    assert workers.in_state(HERE) == [0]
    workers.leave(0, 0.0)
    assert workers.in_state(LEFT) == [0]
    workers.lose(0, "its connection was closed", 0.0)
    assert workers.in_state(LEFT) == [0]
    workers.check()


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"fleetlight": "0.2"}, "worker 0 runs fleetlight 0.2, this server 0.1"),
        ({"server": 0}, "expects server=0, but this server has server=1"),
        ({"worker_num": 3}, "expects worker_num=3, but this server has worker_num=2"),
        ({"server_num": 1}, "expects server_num=1, but this server has server_num=2"),
        ({"worker": 2}, "has index 2, expected 0 to 1"),
        ({"worker": -1}, "has index -1"),
    ],
)
def test_a_mismatched_greeting_is_refused_with_the_difference(
    facts: dict[str, Any], text: str
) -> None:
    with pytest.raises(MembershipError, match=text):
        roster().arrive(hello(**facts) if "worker" in facts else hello(0, **facts))


def test_two_workers_with_one_index_are_refused() -> None:
    workers = roster()
    workers.arrive(hello(0))
    with pytest.raises(MembershipError, match="two workers 0"):
        workers.arrive(hello(0, started_at=6))


def test_all_workers_receive_the_first_failure() -> None:
    workers = roster()
    workers.arrive(hello(0))
    workers.arrive(hello(1))
    workers.leave(1, 0.0, "ValueError: boom")
    workers.lose(0, "its connection was closed", 0.0)
    assert workers.in_state(LOST) == [0]
    with pytest.raises(PeerLostError, match="worker 1 failed: ValueError: boom"):
        workers.check()


@pytest.mark.parametrize(("end", "text"), [("leave", "after it had left"), ("lose", "it was lost")])
def test_a_worker_that_is_gone_may_not_return(end: str, text: str) -> None:
    workers = roster()
    workers.arrive(hello(0))
    workers.leave(0, 0.0) if end == "leave" else workers.lose(0, "silence", 0.0)
    with pytest.raises(MembershipError, match=text):
        workers.arrive(hello(0))


def test_a_joined_worker_is_refused_by_a_server_without_its_state() -> None:
    workers = roster()
    with refuses(MembershipError, "trained with an earlier incarnation", "values are lost"):
        workers.arrive(hello(0, joined=True))
    workers.restore_gone([])
    workers.arrive(hello(0, joined=True))
    assert workers.in_state(HERE) == [0]


def test_a_goodbye_may_be_repeated_to_a_restarted_server() -> None:
    workers = roster()
    workers.restore_gone([(1, 5, False)])
    assert workers.in_state(LEFT) == [1]
    workers.arrive(hello(1, joined=True))
    assert workers.in_state(LEFT) == [1]
    assert workers.gone() == [(1, 5, False)]
    with pytest.raises(MembershipError, match="returned after it had left"):
        workers.arrive(hello(1, started_at=6))


def test_a_lost_worker_stays_lost_in_a_restarted_server() -> None:
    workers = roster()
    workers.restore_gone([(1, 5, True)])
    assert workers.gone() == []
    workers.tolerates_loss = True
    assert (workers.in_state(LOST), workers.gone()) == ([1], [(1, 5, True)])
    with pytest.raises(MembershipError, match="after it was lost"):
        workers.arrive(hello(1, joined=True))
    # its goodbye arrives too late
    workers.leave(1, 0.0)
    assert workers.in_state(LOST) == [1]


def test_a_worker_that_may_restart_is_awaited() -> None:
    workers = roster()
    workers.arrive(hello(0, away_s=10.0))
    workers.lose(0, "its connection was closed", 100.0)
    workers.give_up(110.0)
    workers.check()
    assert workers.in_state(AWAY) == [0]
    assert workers.arrive(hello(0, incarnation=2, away_s=10.0))
    workers.give_up(1000.0)
    workers.check()
    assert workers.in_state(HERE) == [0]


def test_a_worker_that_does_not_return_in_time_is_lost() -> None:
    workers = roster()
    workers.arrive(hello(0, away_s=10.0))
    workers.lose(0, "its connection was closed", 100.0)
    workers.give_up(110.5)
    assert workers.in_state(LOST) == [0]
    with pytest.raises(PeerLostError, match=r"was closed; it has not returned for 10 s"):
        workers.check()
    with pytest.raises(MembershipError, match="after it was lost"):
        workers.arrive(hello(0, incarnation=2))


def test_a_silent_worker_that_sends_a_heartbeat_is_not_lost() -> None:
    workers = roster()
    workers.arrive(hello(0, away_s=10.0))
    workers.lose(0, "it has been silent", 100.0)
    workers.come_back(0, 6, 1)
    workers.come_back(0, 5, 2)
    assert workers.is_away(0)
    workers.come_back(0, 5, 1)
    assert workers.in_state(HERE) == [0]
    workers.lose(0, "its connection was closed", 100.0)
    workers.give_up(110.5)
    workers.come_back(0, 5, 1)
    assert workers.in_state(LOST) == [0]


def test_an_earlier_incarnation_is_refused() -> None:
    workers = roster()
    assert not workers.arrive(hello(0, away_s=10.0))
    assert workers.arrive(hello(0, incarnation=2, away_s=10.0))
    assert not workers.arrive(hello(0, incarnation=2, lane="push"))
    workers.check_incarnation(0, 2)
    older = r"worker 0 has been restarted \(incarnation 2\), but its incarnation 1 still calls"
    with pytest.raises(MembershipError, match=older):
        workers.check_incarnation(0, 1)
    with pytest.raises(MembershipError, match=older):
        workers.arrive(hello(0, lane="push"))


def test_a_later_incarnation_may_repeat_the_goodbye() -> None:
    workers = roster()
    workers.arrive(hello(0, away_s=10.0))
    workers.leave(0, 0.0)
    assert not workers.arrive(hello(0, incarnation=2, away_s=10.0))
    assert workers.in_state(LEFT) == [0]


def test_a_goodbye_whose_reply_was_lost_may_be_repeated() -> None:
    workers = roster()
    workers.arrive(hello(0))
    workers.leave(0, 0.0)
    assert not workers.arrive(hello(0, joined=True))
    assert workers.in_state(LEFT) == [0]


@pytest.mark.parametrize("away_s", [0.0, 10.0])
def test_with_lost_worker_go_on_a_loss_is_no_failure(away_s: float) -> None:
    workers = roster()
    workers.tolerates_loss = True
    workers.arrive(hello(0))
    workers.arrive(hello(1, away_s=away_s))
    workers.lose(1, "its connection was closed", 100.0)
    assert workers.give_up(100.0) == []
    ((worker, why),) = workers.give_up(111.0)
    assert (worker, workers.in_state(LOST)) == (1, [1])
    assert why.startswith("worker 1 disconnected without goodbye: its connection was closed")
    workers.check()
    assert workers.give_up(112.0) == []
    with pytest.raises(MembershipError, match="after it was lost"):
        workers.arrive(hello(1, incarnation=2))
    workers.leave(0, 0.0)
    assert workers.is_over


def test_the_loss_of_worker_0_ends_the_job() -> None:
    workers = roster()
    workers.tolerates_loss = True
    workers.arrive(hello(0))
    workers.lose(0, "its connection was closed", 100.0)
    with pytest.raises(PeerLostError, match="worker 0 disconnected"):
        workers.check()
    others = roster()
    others.tolerates_loss = True
    others.arrive(hello(1))
    others.leave(1, 0.0, "ValueError: boom")
    others.check()
    others.leave(0, 0.0, "ValueError: boom")
    with pytest.raises(PeerLostError, match="worker 0 failed"):
        others.check()


def test_a_restarted_server_refuses_earlier_incarnations_of_workers() -> None:
    before = roster()
    assert before.arrivals() == []
    before.arrive(hello(0, away_s=10.0))
    assert before.arrivals() == [(0, 5, 1)]
    before.arrive(hello(0, incarnation=2, away_s=10.0))
    assert before.arrivals() == [(0, 5, 2)]
    workers = roster()
    # a worker may arrive before the recovered arrivals are known
    workers.arrive(hello(1, started_at=7))
    workers.restore_gone([])
    workers.restore_arrivals([*before.arrivals(), (1, 7, 3)])
    with refuses(MembershipError, "restarted (incarnation 2)", "but its incarnation 1 still"):
        workers.arrive(hello(0, joined=True))
    with pytest.raises(MembershipError, match="incarnation 3"):
        workers.check_incarnation(1, 1)
    workers.arrive(hello(0, joined=True, incarnation=2))
    assert workers.in_state(HERE) == [0, 1]
    # a goodbye does not change the known incarnations
    workers.restore_gone([(0, 5, False)])
    assert workers.arrivals() == [(0, 5, 2), (1, 7, 3)]


def test_a_known_worker_that_does_not_reconnect_is_lost() -> None:
    workers = Roster(server=1, server_num=2, worker_num=4, version="0.1")
    workers.tolerates_loss = True
    workers.arrive(hello(0, worker_num=4))
    workers.restore_gone([(2, 5, False)])
    workers.restore_arrivals([(0, 5, 1), (1, 5, 2), (2, 5, 1)])
    workers.expect(100.0, 10.0)
    assert [workers.in_state(state) for state in (HERE, LEFT, ABSENT)] == [[0], [2], [1, 3]]
    assert workers.overdue(110.0) == []
    # worker 3 never arrived
    ((worker, why),) = workers.give_up(110.5)
    assert worker == 1
    assert why.endswith("this server was restarted; it has not returned for 10 s")
    assert (workers.in_state(LOST), workers.in_state(ABSENT)) == ([1], [3])


def test_a_known_worker_that_reconnects_is_not_lost() -> None:
    workers = roster()
    workers.restore_gone([])
    workers.restore_arrivals([(0, 5, 1), (1, 5, 1)])
    workers.expect(100.0, 10.0)
    assert not workers.arrive(hello(0, joined=True, away_s=10.0))
    assert workers.arrive(hello(1, incarnation=2, away_s=10.0))
    assert (workers.in_state(HERE), workers.overdue(1000.0)) == ([0, 1], [])


@pytest.mark.parametrize("state", [HERE, AWAY, ABSENT])
def test_a_newcomer_waits_until_each_server_has_given_up_the_last_worker(state: str) -> None:
    workers = Roster(server=1, server_num=2, worker_num=2, version="0.1", places=3)
    workers.tolerates_loss = True
    if state == ABSENT:
        workers.restore_arrivals([(1, 5, 1)])
    else:
        workers.arrive(elastic_hello(away_s=9.0))
    if state == AWAY:
        workers.lose(1, "its connection was closed", 0.0)
    newcomer = elastic_hello(started_at=6, joins=True)
    with pytest.raises(PeerLostError, match="has not yet given up the last worker in place 1"):
        workers.arrive(newcomer)
    workers.leave(1, 0.0)
    workers.arrive(newcomer)
    assert workers.joining() == [1]
    with pytest.raises(MembershipError, match="another worker has its place"):
        workers.check_process(Peer(1, 5, "control"))
    workers.check_process(Peer(1, 6, "control"))


def test_a_restarted_server_refuses_the_last_worker_of_a_place() -> None:
    workers = Roster(server=0, server_num=2, worker_num=2, version="0.1", places=3)
    workers.restore_gone([(1, 5, True)])
    workers.restore_arrivals([(1, 6, 1)])
    with pytest.raises(MembershipError, match="another worker has its place"):
        workers.arrive(elastic_hello(server=0, started_at=5, joined=True))
    workers.arrive(elastic_hello(server=0, started_at=6, joined=True))
    assert workers.joining() == [1]


def test_server_0_gives_a_place_to_one_newcomer() -> None:
    workers = Roster(server=0, server_num=2, worker_num=2, version="0.1", places=3)
    workers.arrive(elastic_hello(2, server=0, joins=True))
    with pytest.raises(MembershipError, match="place 2 was taken by another worker"):
        workers.arrive(elastic_hello(2, server=0, joins=True, started_at=6))


def test_no_worker_joins_once_all_others_have_left() -> None:
    workers = Roster(server=0, server_num=2, worker_num=1, version="0.1", places=2)
    newcomer = elastic_hello(server=0, worker_num=1, worker_max=2, joins=True)
    workers.leave(0, 0.0)
    with pytest.raises(MembershipError, match="the job has ended before"):
        workers.place_for(5, 0.0)
    with pytest.raises(MembershipError, match="the job has ended before"):
        workers.arrive(newcomer)


def test_a_newcomer_may_come_and_die_while_a_server_recovers() -> None:
    workers = Roster(server=1, server_num=2, worker_num=1, version="0.1", places=3)
    workers.arrive(elastic_hello(worker_num=1, started_at=6, joins=True))
    # the worker that had the place before
    workers.restore_gone([(1, 5, True)])
    assert workers.joining() == [1]
    workers.lose(1, "its connection was closed", 0.0)
    assert workers.give_up(1.0)
    workers.check()


# Barriers: all workers enter with the same operation and receive the values of all.


def test_every_worker_receives_the_values_of_all() -> None:
    barriers: Barriers[str] = Barriers(3)
    barriers.enter(2, 0, "gather", "c")
    barriers.enter(0, 0, "gather", "a")
    assert barriers.result(0) is None
    assert barriers.missing(0) == [1]
    barriers.enter(1, 0, "gather", "b")
    assert barriers.result(0) == ["a", "b", "c"]


def test_entering_twice_has_no_effect() -> None:
    barriers: Barriers[str] = Barriers(2)
    barriers.enter(0, 0, "gather", "a")
    barriers.enter(0, 0, "gather", "a")
    assert barriers.result(0) is None
    barriers.enter(1, 0, "gather", "b")
    # the reply was lost: worker 0 repeats its request while worker 1 is at the next barrier
    barriers.enter(1, 1, "barrier", "")
    barriers.enter(0, 0, "gather", "a")
    assert barriers.result(0) == ["a", "b"]
    barriers.enter(0, 1, "barrier", "")
    assert barriers.result(1) == ["", ""]
    assert barriers.result(0) == [], "a thread that still waits for the last barrier ends"
    with refuses(ProtocolError, "worker 0 entered barrier 0", "barrier 1 is complete"):
        barriers.enter(0, 0, "gather", "a")


def test_different_operations_are_an_error_for_all_workers() -> None:
    barriers: Barriers[str] = Barriers(2)
    barriers.enter(0, 0, "barrier_worker", "")
    with pytest.raises(ProtocolError, match=r"worker 0 waits in 'barrier_worker'.*worker 1.*'acc'"):
        barriers.enter(1, 0, "acc", "")
    with pytest.raises(ProtocolError, match="acc"):
        barriers.result(0)
    with pytest.raises(ProtocolError, match="acc"):
        barriers.enter(1, 1, "anything", "")


def test_a_worker_that_enters_after_a_timeout_gets_the_error() -> None:
    barriers: Barriers[str] = Barriers(2)
    barriers.enter(0, 0, "save", "")
    barriers.give_up(DeadlineError("save waited 5 s for worker 1"))
    barriers.give_up(PeerError("and then this"))
    with pytest.raises(DeadlineError, match="waited 5 s for worker 1"):
        barriers.enter(1, 0, "save", "")


def test_barriers_complete_without_a_worker_that_left() -> None:
    barriers: Barriers[str] = Barriers(3)
    for worker in (0, 1):
        barriers.enter(worker, 0, "gather", "ab"[worker])
    barriers.leave(2)
    assert barriers.result(0) == ["a", "b"]
    barriers.enter(1, 1, "gather", "b")
    assert barriers.missing(1) == [0]
    # the value that it contributed stays
    barriers.leave(1)
    barriers.enter(0, 1, "gather", "a")
    assert barriers.result(1) == ["a", "b"]
    barriers.enter(0, 2, "gather", "a")
    assert barriers.result(2) == ["a"]


def test_a_prelude_stated_again_replaces_no_later_barrier() -> None:
    """A server dies while it begins a new log file, which states the prelude first."""
    barriers: Barriers[str] = Barriers(2, 3)
    barriers.restore(1, "init", ["a", "b"], is_prelude=True)
    barriers.restore(2, "gather", ["c", "d"])
    barriers.restore(1, "init", ["a", "b"], is_prelude=True)
    assert barriers.result(2) == ["c", "d"]
    assert [number for number, _, _ in barriers.prelude] == [1]


# A server that is asked to stop does not wait for workers that have not connected.


def test_a_stop_before_workers_connect_ends_the_server() -> None:
    clock = itertools.count(0.0, 4.0)
    presence = PresenceMonitor(Roster(0, 1, 2, "0.1"), 2, 300.0, lambda: next(clock))
    presence.call_stop()
    text = r"asked to stop, and the server has waited 10 s for worker 0 \(it never connected\), wo"
    with pytest.raises(StoppedError, match=text):
        presence.until_all_left(lambda: None)
    assert next(clock) < 200


# A restarted worker replaces its earlier incarnation; meanwhile the others wait for it.


def test_connections_of_an_earlier_incarnation_do_not_count() -> None:
    server = opened(plan("async"))
    _, second = team(server)
    second.greet_again("control", 2)
    second.disconnect("push", "pull")
    assert server._roster.in_state(HERE) == [0, 1]
    second.disconnect("control")
    assert server._roster.in_state(AWAY) == [1]


def test_a_restarted_worker_replaces_its_earlier_incarnation() -> None:
    server = opened(plan("async", workers=1))
    worker = Worker(server, 0, 1)
    worker.push(0, {0: ([7], [-1.0])})
    before = dict(worker.lanes)
    for lane in before:
        worker.greet_again(lane, 2)
    # the restarted worker repeats the last push of its predecessor
    worker.sequence -= 1
    worker.push(0, {0: ([7], [-1.0])})
    worker.push(1, {0: ([7], [-1.0])})
    assert worker.pull(0, [7]) == [2.0]
    for lane, connection in before.items():
        worker.lanes[lane] = connection
        with pytest.raises(MembershipError, match="its incarnation 1 still calls"):
            worker.pull(0, [7]) if lane == "pull" else worker.say(m.Heartbeat(1), lane=lane)
    # the end of the earlier incarnation's connections has no effect
    worker.disconnect(*before)
    assert server._roster.in_state(HERE) == [0]
    server.close()


def test_a_step_waits_for_a_worker_that_is_away() -> None:
    first, second = team(opened(plan("sync")))
    second.greet_again("control", 1)
    second.disconnect()

    def return_and_push() -> Any:
        for lane in second.lanes:
            second.greet_again(lane, 2)
        return second.push(0, {0: ([7], [-1.0])})

    together(lambda: first.push(0, {0: ([7], [-1.0])}), return_and_push)
    assert first.pull(0, [7]) == [1.0]


def test_a_restarted_worker_has_no_prefetched_rows() -> None:
    worker = Worker(opened(plan("sync", workers=1)), 0, 1)
    worker.pull(0, [7], ahead=True, batch=1)
    worker.greet_again("push", 2)
    reply, arrays = worker.push(0, {0: ([7], [-1.0])}, wants_dense=False)
    assert (reply.changed, arrays) == ([], [])


# Threads of a server that wait for workers wake once, not for each request of another worker.


WORKERS = 4
DEADLINE_S = 20.0


class Waits:
    """Counts the waits of the threads of a pool, and the notifications that ended them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notified = 0
        self._began = threading.Semaphore(0)
        wait = threading.Condition.wait

        def counted(condition: threading.Condition, timeout: float | None = None) -> bool:
            if not threading.current_thread().name.startswith("worker"):
                return wait(condition, timeout)
            self._began.release()
            is_notified = wait(condition, timeout)
            self.notified += is_notified
            return is_notified

        monkeypatch.setattr(threading.Condition, "wait", counted)
        # a wait that times out is not notified
        monkeypatch.setattr(presence, "_LOOK_EVERY_S", 60.0)

    def begin(self, count: int) -> None:
        """Return once that many waits have begun; the next holder of their lock finds them."""
        for _ in range(count):
            assert self._began.acquire(timeout=DEADLINE_S)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(WORKERS, "worker") as made:
        yield made


def ended(calls: list[concurrent.futures.Future[Any]]) -> None:
    for call in calls:
        call.result(DEADLINE_S)


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(FleetError):
        call()


def test_a_step_wakes_each_waiting_worker_once(
    waits: Waits, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    *others, last = team(opened(plan(workers=WORKERS)), WORKERS)
    calls = [pool.submit(worker.push, 0, {0: ([1], [1])}) for worker in others]
    waits.begin(len(others))
    for _ in range(5):
        # the end of this request is no news for the others
        refused(lambda: last.push(0, optimizer=9))
        last.greet("pull")
    last.push(0, {0: ([1], [1])})
    ended(calls)
    assert waits.notified == len(others)


def test_a_barrier_wakes_each_waiting_worker_once(
    waits: Waits, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    *others, last = team(opened(plan(workers=WORKERS)), WORKERS)
    calls = []
    for worker in others:
        calls.append(pool.submit(worker.say, m.Barrier(0, "a barrier", 20.0)))
        waits.begin(1)
    last.say(m.Barrier(0, "a barrier", 20.0))
    ended(calls)
    assert waits.notified == len(others)


def test_pushes_wake_no_barrier(waits: Waits, pool: concurrent.futures.ThreadPoolExecutor) -> None:
    first, second = team(opened(plan("async")))
    call = pool.submit(first.say, m.Barrier(0, "a barrier", 20.0))
    waits.begin(1)
    for step in range(5):
        second.push(step, {0: ([1], [1])})
    second.say(m.Barrier(0, "a barrier", 20.0))
    ended([call])
    assert waits.notified == 1


def test_a_pull_waits_for_pushes_and_leaving_workers(
    waits: Waits, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    first, second, third = team(opened(plan("async", workers=3)), 3)
    first.push(0)
    call = pool.submit(first.say, m.Pull([], dense=False, at_least=1), lane="pull")
    waits.begin(1)
    second.push(0)
    waits.begin(1)
    third.say(m.EndPhase(0))
    ended([call])
    assert waits.notified == 2


@pytest.mark.parametrize("kind", ["step", "barrier", "pull"])
def test_a_failed_worker_ends_every_wait(
    kind: str, waits: Waits, pool: concurrent.futures.ThreadPoolExecutor
) -> None:
    first, second = team(opened(plan("sync" if kind == "step" else "async")))
    calls: dict[str, Callable[[Worker], object]] = {
        "step": lambda worker: worker.push(0),
        "barrier": lambda worker: worker.say(m.Barrier(0, "a barrier", 20.0)),
        "pull": lambda worker: worker.say(m.Pull([], dense=False, at_least=1)),
    }
    call = pool.submit(calls[kind], first)
    waits.begin(1)
    second.say(m.Leave("it failed"))
    with pytest.raises(FleetError, match="it failed"):
        call.result(DEADLINE_S)
    assert waits.notified == 1
