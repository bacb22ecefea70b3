# SPDX-License-Identifier: Apache-2.0
"""Admissions: a turn is held until all workers that join there are known to all servers."""

from __future__ import annotations

from fleetlight.ps.server.shard_queue.admissions import HOLD_S, Admissions

TURN = (0, 3)


def test_a_turn_is_held_from_the_state_to_the_last_server() -> None:
    admissions = Admissions()
    assert not admissions.hold(TURN, 0.0)
    assert admissions.wait(4, 0) is None
    assert admissions.hold(TURN, 0.0)
    assert admissions.wants_state(TURN)
    admissions.offer(TURN)
    assert not admissions.wants_state(TURN)
    assert admissions.wait(4, 0) == TURN
    assert admissions.enter(4, TURN)
    assert admissions.hold(TURN, 0.0)
    admissions.entered(4)
    assert not admissions.hold(TURN, 0.0)
    admissions.begin(TURN)
    assert admissions.wait(5, 0) is None


def test_a_worker_enters_only_at_the_turn_whose_state_it_has() -> None:
    admissions = Admissions()
    admissions.wait(4, 0)
    assert not admissions.enter(4, TURN)
    admissions.offer(TURN)
    assert not admissions.enter(4, (0, 2))
    assert not admissions.enter(5, TURN)
    assert admissions.enter(4, TURN)
    # the reply may be lost
    assert admissions.enter(4, TURN)


def test_only_turns_of_its_loader_wait_for_a_worker() -> None:
    admissions = Admissions()
    admissions.wait(4, 0)
    assert not admissions.hold((1, 1), 0.0)
    assert admissions.hold((0, 1), 0.0)


def test_a_turn_begins_without_a_state_after_a_while() -> None:
    admissions = Admissions()
    admissions.wait(4, 0)
    assert admissions.hold(TURN, 10.0)
    assert admissions.hold(TURN, 10.0 + HOLD_S)
    assert not admissions.hold(TURN, 10.1 + HOLD_S)
    assert admissions.hold((0, 4), 11.0 + HOLD_S)


def test_a_turn_begins_at_once_where_no_worker_can_join() -> None:
    admissions = Admissions()
    admissions.wait(4, 0)
    admissions.skip(TURN)
    assert not admissions.hold(TURN, 0.0)
    assert admissions.hold((0, 4), 0.0)


def test_no_turn_waits_for_a_worker_that_is_lost() -> None:
    admissions = Admissions()
    admissions.wait(4, 0)
    admissions.wait(5, 0)
    admissions.offer(TURN)
    admissions.enter(4, TURN)
    admissions.forget(4)
    admissions.forget(5)
    assert not admissions.hold(TURN, 0.0)
    assert admissions.entering == []
