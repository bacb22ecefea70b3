# SPDX-License-Identifier: Apache-2.0
"""A restarted worker replaces its earlier incarnation; meanwhile the others wait for it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.ps.serving import Worker, opened, plan, team, together

from fleetlight.errors import MembershipError
from fleetlight.ps import messages as m
from fleetlight.ps.server.workers.roster import AWAY, HERE


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
    server = opened(plan("sync"))
    first, second = team(server)
    second.greet_again("control", 1)
    second.disconnect()

    def return_and_push() -> Any:
        for lane in second.lanes:
            second.greet_again(lane, 2)
        return second.push(0, {0: ([7], [-1.0])})

    together(lambda: first.push(0, {0: ([7], [-1.0])}), return_and_push)
    assert first.pull(0, [7]) == [1.0]


def test_a_restarted_worker_has_no_prefetched_rows() -> None:
    server = opened(plan("sync", workers=1))
    worker = Worker(server, 0, 1)
    worker.pull(0, [7], ahead=True, batch=1)
    worker.greet_again("push", 2)
    reply, arrays = worker.push(0, {0: ([7], [-1.0])}, wants_dense=False)
    assert (reply.changed, arrays) == ([], [])
