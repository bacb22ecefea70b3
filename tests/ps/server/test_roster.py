# SPDX-License-Identifier: Apache-2.0
"""Roster: who may come, and what is told about who has gone."""

from __future__ import annotations

from typing import Any

import pytest

from fleetlight.errors import MembershipError, PeerLostError
from fleetlight.ps.messages import Hello
from fleetlight.ps.server.roster import ABSENT, HERE, LEFT, LOST, Roster


def roster() -> Roster:
    return Roster(server=1, server_num=2, worker_num=2, version="0.1")


def hello(worker: int = 0, **facts: Any) -> Hello:
    usual: dict[str, Any] = {
        "fleetlight": "0.1", "worker_num": 2, "server": 1, "server_num": 2,
        "incarnation": 5, "lane": "control",
    }  # fmt: skip
    return Hello(worker=worker, **{**usual, **facts})


def test_workers_come_and_leave() -> None:
    workers = roster()
    assert workers.those(ABSENT) == [0, 1]
    workers.arrive(hello(0))
    workers.arrive(hello(0, lane="push"))
    assert workers.those(HERE) == [0]
    workers.leave(0)
    assert workers.those(LEFT) == [0]
    workers.lose(0, "its connection was closed")
    assert workers.those(LEFT) == [0]
    workers.check()


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"fleetlight": "0.2"}, "worker 0 runs fleetlight 0.2, this server 0.1"),
        ({"server": 0}, "expects server=0, but this server has server=1"),
        ({"worker_num": 3}, "expects worker_num=3, but this server has worker_num=2"),
        ({"server_num": 1}, "expects server_num=1, but this server has server_num=2"),
        ({"worker": 2}, "calls itself 2, expected 0 to 1"),
        ({"worker": -1}, "calls itself -1"),
    ],
)
def test_strangers_are_told_what_does_not_fit(facts: dict[str, Any], text: str) -> None:
    with pytest.raises(MembershipError, match=text):
        roster().arrive(hello(**facts) if "worker" in facts else hello(0, **facts))


def test_two_with_one_index_are_told() -> None:
    workers = roster()
    workers.arrive(hello(0))
    with pytest.raises(MembershipError, match="two workers 0"):
        workers.arrive(hello(0, incarnation=6))


def test_the_first_failure_is_what_everybody_is_told() -> None:
    workers = roster()
    workers.arrive(hello(0))
    workers.arrive(hello(1))
    workers.leave(1, "ValueError: boom")
    workers.lose(0, "its connection was closed")
    assert workers.those(LOST) == [0]
    with pytest.raises(PeerLostError, match="worker 1 failed: ValueError: boom"):
        workers.check()


@pytest.mark.parametrize(("end", "text"), [("leave", "after it had left"), ("lose", "had gone")])
def test_nobody_comes_back(end: str, text: str) -> None:
    workers = roster()
    workers.arrive(hello(0))
    workers.leave(0) if end == "leave" else workers.lose(0, "silence")
    with pytest.raises(MembershipError, match=text):
        workers.arrive(hello(0))


def test_who_has_trained_with_an_earlier_life_is_told_that_it_is_lost() -> None:
    workers = roster()
    with pytest.raises(MembershipError, match=r"trained with an earlier life .* values are lost"):
        workers.arrive(hello(0, joined=True))
    workers.outlive([])
    workers.arrive(hello(0, joined=True))
    assert workers.those(HERE) == [0]


def test_a_goodbye_may_be_said_to_two_lives() -> None:
    workers = roster()
    workers.outlive([(1, 5)])
    assert workers.those(LEFT) == [1]
    workers.arrive(hello(1, joined=True))
    assert workers.those(LEFT) == [1]
    assert workers.gone() == [(1, 5)]
    with pytest.raises(MembershipError, match="came back after it had left"):
        workers.arrive(hello(1, incarnation=6))
