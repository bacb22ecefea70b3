# SPDX-License-Identifier: Apache-2.0
"""Roster: which workers may arrive, and what errors say about those that are gone."""

from __future__ import annotations

from typing import Any

import pytest

from fleetlight.errors import MembershipError, PeerLostError
from fleetlight.ps.messages import Greeting
from fleetlight.ps.server.workers.roster import ABSENT, AWAY, HERE, LEFT, LOST, Peer, Roster


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
    with pytest.raises(
        MembershipError, match=r"trained with an earlier incarnation .* values are lost"
    ):
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
    with pytest.raises(
        MembershipError, match=r"restarted \(incarnation 2\), but its incarnation 1 still"
    ):
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
