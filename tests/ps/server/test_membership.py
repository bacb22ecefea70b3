# SPDX-License-Identifier: Apache-2.0
"""Company: who comes, meets, leaves or gets lost, and what is said of who is missing."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.ps.serving import (
    OPTIONS,
    Worker,
    ask,
    closed_server,
    hello,
    ids_of,
    opened,
    plan,
    rows_of,
    team,
    together,
)

from fleetlight.errors import DeadlineError, MembershipError, PeerLostError, StoppedError
from fleetlight.launch.processes import watch
from fleetlight.ps import messages as m
from fleetlight.ps.server.server import Server
from fleetlight.ps.server.workers import presence as attendance
from fleetlight.ps.server.workers.roster import AWAY, HERE, LOST
from fleetlight.ps.transport import Connection, Listener, SocketChannel
from fleetlight.wire.control_signals import ControlSignal


def test_workers_meet_before_the_plan_is_known() -> None:
    first, second = team(closed_server())
    answers = together(lambda: first.meet(0, "init", 3), lambda: second.meet(0, "init", 4))
    assert [[list(array) for array in answer] for answer in answers] == [[[3], [4]]] * 2


def test_a_worker_that_does_not_come_is_named() -> None:
    first = Worker(opened(plan(), deadline_s=0.05), 0)
    with pytest.raises(
        DeadlineError, match=r"barrier waited 0\.03 s for worker 1 \(it never connected"
    ):
        first.meet(0, "barrier", deadline_s=0.03)


def test_a_worker_that_is_elsewhere_is_named_with_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = opened(plan("async"), deadline_s=0.3)
    first, second = team(server)
    second.say(m.Heartbeat(41))
    first.push(0)
    with pytest.raises(DeadlineError, match=r"worker 1 \(silent for \d+ s, last at step 41\)"):
        first.pull(0, [1], at_least=1)
    is_there, barrier = threading.Event(), server._membership.barrier

    def told(*of: Any) -> Any:
        is_there.set()
        return barrier(*of)

    def pull() -> list[float]:
        assert is_there.wait(60)
        try:
            return first.pull(0, [1], at_least=1)
        finally:
            server.refuse()

    monkeypatch.setattr(server._membership, "barrier", told)
    answers = together(pull, lambda: second.meet(0, "auc", deadline_s=60.0))
    assert isinstance(answers[0], DeadlineError)
    assert "every worker waited 0.3 s for worker 1 (it is in auc)" in str(answers[0])


@pytest.mark.parametrize("held", [False, True])
def test_a_meeting_that_waits_for_a_step_that_waits_for_the_meeting(held: bool) -> None:
    server = opened(plan(workers=3))
    workers = team(server, 3)
    begin, *_ = together(*[lambda w=w: w.push(0, hold=held) for w in workers])
    assert isinstance(begin, tuple)
    met, stepped, left = together(
        lambda: workers[0].meet(0, "metrics.sum"),
        lambda: workers[1].apply(0, 1.0) if held else workers[1].push(1),
        lambda: left_with_error(server, workers[0]),
    )
    assert isinstance(met, MembershipError)
    assert "metrics.sum of worker 0 would wait for worker 1" in str(met)
    assert "fleet.barrier_worker() first" in str(met)
    assert "worker 0 failed: uneven" in str(stepped)
    # who comes to the meeting later is told, too
    with pytest.raises(PeerLostError):
        workers[2].meet(0, "metrics.sum")
    assert left is None


def left_with_error(server: Server, worker: Worker) -> None:
    """What a worker does when a meeting of its has failed."""
    with server._changed:
        assert server._changed.wait_for(lambda: server._membership.barriers._broken is not None, 20)
    worker.say(m.Leave("uneven"), lane="pull")


def test_a_meeting_may_wait_for_a_step_of_those_that_go_on() -> None:
    workers = team(opened(plan(workers=3)), 3)
    workers[0].say(m.EndPhase(0))

    def last(worker: Worker) -> Any:
        worker.push(0)
        worker.say(m.EndPhase(0))
        return worker.meet(0, "barrier", worker.index)

    met = together(
        lambda: workers[0].meet(0, "barrier"), lambda: last(workers[1]), lambda: last(workers[2])
    )
    assert [[int(array[0]) for array in each] for each in met] == [[0, 1, 2]] * 3


@pytest.mark.parametrize("operation", ["push", "meet", "pull"])
def test_a_lost_worker_is_told_to_whoever_waits(operation: str) -> None:
    server = opened(plan("sync" if operation == "push" else "async"))
    first, second = team(server)
    waits = {
        "push": lambda: first.push(0),
        "meet": lambda: first.meet(0, "barrier"),
        "pull": lambda: first.pull(0, [1], at_least=1),
    }
    lost, _ = together(waits[operation], second.hang_up)
    assert isinstance(lost, PeerLostError)
    assert "worker 1 disconnected without goodbye" in str(lost)
    # and to whoever calls later
    for call in (*waits.values(), lambda: first.say(m.Heartbeat(0))):
        with pytest.raises(PeerLostError, match="worker 1 disconnected"):
            call()
    first.leave()


def test_a_worker_that_failed_is_told_with_its_error() -> None:
    server = opened(plan())
    first, second = team(server)
    lost, _ = together(lambda: first.push(0), lambda: second.say(m.Leave("ValueError: boom")))
    assert isinstance(lost, PeerLostError)
    assert "worker 1 failed: ValueError: boom" in str(lost)
    second.hang_up()
    first.leave()
    with pytest.raises(PeerLostError, match="worker 1 failed: ValueError: boom"):
        server.wait()


def test_who_comes_after_a_failure_is_told_by_the_first_answer() -> None:
    server = opened(plan())
    Worker(server, 1).hang_up()
    late = Worker(server, 0)
    with pytest.raises(PeerLostError, match="worker 1 disconnected"):
        late.say(m.Join(plan()))


def test_over_sockets_a_worker_that_hangs_up_is_lost() -> None:
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
        with pytest.raises(
            PeerLostError, match=r"server 0 .*worker 1 disconnected without goodbye"
        ):
            first.receive()
        first.call(m.Leave())
        with pytest.raises(PeerLostError, match="worker 1 disconnected"):
            server.wait()
        first.close()
    finally:
        listener.stop()


@pytest.mark.parametrize("last", ["control", "push", "pull"])
def test_a_worker_is_there_as_long_as_one_of_its_connections_is(last: str) -> None:
    server = opened(plan("async"))
    first, second = team(server)
    second.hang_up(*({"control", "push", "pull"} - {last}))
    assert first.pull(0, [1]) == [0]
    # the worker calls again before the server has noticed the end of the old connection
    old, second.lanes[last] = second.lanes[last], Connection("again")
    second.greet(last)
    server.gone(old, None)
    assert first.pull(0, [1]) == [0]
    second.hang_up(last)
    with pytest.raises(PeerLostError, match="worker 1 disconnected without goodbye"):
        first.pull(0, [1], at_least=1)


def test_the_end_of_a_process_is_noticed_while_a_request_is_under_way() -> None:
    """Nobody reads from that connection meanwhile."""
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
            # nobody is called when it comes
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


def test_it_is_also_noticed_when_the_end_of_that_connection_comes_late() -> None:
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
            first.meet(0, "barrier")
        first.leave()

    lost, ended = together(server.wait, end)
    assert "worker 1 disconnected without goodbye: its connection was closed" in str(lost)
    assert ended is None


def test_a_worker_that_was_silent_and_calls_again_is_there_again() -> None:
    server = opened(plan("async"))
    _, second = team(server)
    another_life(second, "control", 1)
    with server._changed:
        server._presence.lose(1, "it has been silent for 20 s")
    assert server._roster.in_state(AWAY) == [1]
    second.say(m.Heartbeat(3), lane="push")
    assert server._roster.in_state(HERE) == [0, 1]


def test_connections_of_an_earlier_life_keep_no_worker_there() -> None:
    server = opened(plan("async"))
    _, second = team(server)
    another_life(second, "control", 2)
    second.hang_up("push", "pull")
    assert server._roster.in_state(HERE) == [0, 1]
    second.hang_up("control")
    assert server._roster.in_state(AWAY) == [1]


def test_a_meeting_that_nobody_can_complete_ends_at_once() -> None:
    first, second = team(opened(plan()))
    second.leave()
    with pytest.raises(MembershipError, match="barrier would wait for worker 1, which has left"):
        first.meet(0, "barrier")


@pytest.mark.parametrize("lost_worker", ["fail", "go_on"])
@pytest.mark.parametrize("word", [m.Heartbeat(3, stops=True), m.Leave(stopped=True)], ids=str)
def test_a_meeting_with_one_that_stops_ends_at_once(word: m.Message, lost_worker: str) -> None:
    server = opened(plan(lost_worker=lost_worker))
    first, second = team(server)

    def meet() -> None:
        with pytest.raises(StoppedError, match="barrier would wait for worker 1, which stops"):
            first.meet(0, "barrier")

    def stop() -> None:
        while not server._presence._activities[0].doing:
            pass
        second.say(word)

    together(meet, stop)


def test_who_comes_late_to_a_meeting_is_told() -> None:
    first, second = team(opened(plan()))
    with pytest.raises(DeadlineError):
        first.meet(0, "save", deadline_s=0.02)
    with pytest.raises(DeadlineError, match=r"save waited 0\.02 s for worker 1"):
        second.meet(0, "save")


def test_the_server_ends_when_all_have_left() -> None:
    server = opened(plan())
    first, second = team(server)
    ended, *_ = together(server.wait, lambda: first.leave(), lambda: second.leave())
    assert ended is None
    with pytest.raises(MembershipError, match="returned after it had left"):
        Worker(server, 0)


def test_the_server_stays_for_one_that_may_not_know_that_its_goodbye_was_heard() -> None:
    server = opened(plan())
    first, second = team(server)
    first.leave()
    second.say(m.Leave())
    waiting = threading.Thread(target=server.wait, daemon=True)
    waiting.start()
    # the answer was lost with its connection, and it asks again
    second.hang_up()
    again = Connection("control")
    joined = msgspec.structs.replace(hello(1, "control"), joined=True)
    for message in (joined, m.Leave(), m.GoodbyeAck()):
        assert waiting.is_alive()
        server(again, message, [])
    waiting.join(20)
    assert not waiting.is_alive()


@pytest.mark.parametrize("speaks", [True, False])
def test_but_not_for_ever(speaks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    server = opened(plan())
    first, second = team(server)
    if speaks:
        # before its goodbye that means nothing
        second.say(m.GoodbyeAck())
    second.say(m.Leave())
    first.leave()
    now = time.monotonic()
    assert server._roster.unconfirmed_since() <= now
    monkeypatch.setattr(server._presence, "_clock", lambda: now + attendance._LINGER_S + 0.1)
    server.wait()


def test_a_launcher_waits_longer_than_a_server_does() -> None:
    """One that is ended before keeps what it has; or a worker is started again for nothing."""
    longest = attendance._LINGER_S + attendance._LOOK_EVERY_S
    assert longest + 1.0 < min(watch.LEAVE_S, watch.GOODBYE_S)


def test_the_server_names_who_never_came() -> None:
    server = closed_server(deadline_s=0.05)
    Worker(server, 0)
    with pytest.raises(DeadlineError, match=r"the server waited 0\.05 s for worker 1 \(it never"):
        server.wait()


def test_the_server_notices_silence() -> None:
    server = closed_server(1, deadline_s=0.05)
    Worker(server, 0, 1)
    with pytest.raises(
        PeerLostError, match="worker 0 disconnected without goodbye: it has been sil"
    ):
        server.wait()


def another_life(worker: Worker, lane: str, incarnation: int, away_s: float = 5.0) -> None:
    """The worker greets as one that was started again."""
    worker.lanes[lane] = Connection(lane)
    greeting = msgspec.structs.replace(
        hello(worker.index, lane, worker.workers), incarnation=incarnation, away_s=away_s
    )
    worker.say(greeting, lane=lane)


def test_a_later_life_of_a_worker_takes_the_place_of_the_one_before() -> None:
    server = opened(plan("async", workers=1))
    worker = Worker(server, 0, 1)
    worker.push(0, {0: ([7], [-1.0])})
    before = dict(worker.lanes)
    for lane in before:
        another_life(worker, lane, 2)
    # what the one before had sent is sent again
    worker.sequence -= 1
    worker.push(0, {0: ([7], [-1.0])})
    worker.push(1, {0: ([7], [-1.0])})
    assert worker.pull(0, [7]) == [2.0]
    for lane, connection in before.items():
        worker.lanes[lane] = connection
        with pytest.raises(MembershipError, match="its incarnation 1 still calls"):
            worker.pull(0, [7]) if lane == "pull" else worker.say(m.Heartbeat(1), lane=lane)
    # and its connections may end
    worker.hang_up(*before)
    assert server._roster.in_state(HERE) == [0]
    server.close()


def test_a_worker_that_is_away_is_waited_for_in_a_step() -> None:
    server = opened(plan("sync"))
    first, second = team(server)
    another_life(second, "control", 1)
    second.hang_up()

    def come_back() -> Any:
        for lane in second.lanes:
            another_life(second, lane, 2)
        return second.push(0, {0: ([7], [-1.0])})

    together(lambda: first.push(0, {0: ([7], [-1.0])}), come_back)
    assert first.pull(0, [7]) == [1.0]


def test_rows_pulled_ahead_by_an_earlier_life_are_forgotten() -> None:
    server = opened(plan("sync", workers=1))
    worker = Worker(server, 0, 1)
    worker.pull(0, [7], ahead=True, batch=1)
    another_life(worker, "push", 2)
    answer, arrays = worker.push(0, {0: ([7], [-1.0])}, wants_dense=False)
    assert (answer.changed, arrays) == ([], [])


@pytest.mark.slow
def test_without_a_lost_worker_the_others_meet_and_make_steps() -> None:
    server = opened(plan("sync", lost_worker="go_on"))
    first, second = team(server)

    def wait() -> None:
        server.wait()

    def train() -> float:
        second.hang_up()
        first.push(0, {0: ([7], [-2.0])})
        assert [list(array) for array in first.meet(0, "barrier", 3)] == [[3]]
        found = first.pull(0, [7])[0]
        first.leave()
        return found

    found, _ = together(train, wait)
    assert found == 2.0


def test_a_deadline_that_is_no_number_is_over_at_once() -> None:
    first, _ = team(opened(plan()))
    with pytest.raises(DeadlineError, match="barrier waited nan s for worker 1"):
        first.meet(1, "barrier", deadline_s=float("nan"))


@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
def test_one_that_was_taken_for_lost_cannot_write(mode: str) -> None:
    server = opened(plan(mode, lost_worker="go_on"))
    first, second = team(server)
    second.hang_up()

    def bring() -> None:
        if mode == "geo":
            exchange = m.GeoExchange(0, 0, 0, [0], False)
            second.say(exchange, ids_of([7]), rows_of([1]), lane="push")
        else:
            second.push(0, {0: ([7], [-1.0])})

    def train() -> None:
        # returns once the others do without the second
        first.meet(0, "barrier")
        with pytest.raises(MembershipError, match="worker 1 has left the job or was lo"):
            bring()
        with pytest.raises(MembershipError, match="the server refuses its pushes"):
            second.say(ask())
        assert first.pull(0, [7]) == [0.0]
        first.leave()

    assert together(train, server.wait) == [None, None]


def test_a_stop_is_not_forgotten_over_what_a_worker_calls_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal comes at any moment."""
    server = opened(plan(workers=1))
    worker = Worker(server, 0, 1)
    add = ControlSignal.__or__

    def interrupted(one: ControlSignal, other: ControlSignal) -> ControlSignal:
        monkeypatch.setattr(ControlSignal, "__or__", add)
        server.call_stop()
        return one | other

    monkeypatch.setattr(ControlSignal, "__or__", interrupted)
    worker.say(m.Heartbeat(0, ControlSignal(saves=1)))
    assert worker.say(m.Heartbeat(0))[0].call == ControlSignal(stop=True, saves=1)
