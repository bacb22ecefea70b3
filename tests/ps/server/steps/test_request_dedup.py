# SPDX-License-Identifier: Apache-2.0
"""A push that comes late, by a connection that was given up, stands in nobody's way."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from typing import Any

import pytest
from tests.ps.serving import opened, plan, team

from fleetlight.errors import ProtocolError
from fleetlight.ps import messages as m
from fleetlight.ps.high_water_marks import HighWaterMarks
from fleetlight.ps.server.server import Server
from fleetlight.ps.server.steps.request_dedup import RequestDedup
from fleetlight.ps.server.workers.presence import PresenceMonitor
from fleetlight.ps.server.workers.roster import Peer, Roster

GRADIENTS = {0: ([1], [4])}


def test_a_late_push_does_not_hide_what_came_after_it() -> None:
    server = opened(plan("sync"))
    first, second = team(server)
    held = [one.pushed(0, {0: None}, None, hold=True) for one in (first, second)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda pair: pair[0].send(pair[1], GRADIENTS, None),
                zip((first, second), held, strict=True),
            )
        )
        early = pool.submit(second.apply, 0, 0.5)
        while not _waits(server):
            pass
        # the push once more, long after its answer, and then the factor, too
        with pytest.raises(ProtocolError, match="push 0 of worker 1 came after its push 1"):
            second.send(held[1], GRADIENTS, None)
        second.sequence -= 1
        again = pool.submit(second.apply, 0, 0.5)
        first.apply(0, 0.5)
        for answer in (early.result(20), again.result(20)):
            assert answer[0].applied
    assert first.pull(0, [1]) == [-2]
    server.close()


def _waits(server: Server) -> bool:
    assert server._service is not None
    with server._changed:
        return bool(server._service.pushes.awaited_by(1))


def test_whoever_is_done_forgets_only_its_own_ticket() -> None:
    attendance = PresenceMonitor(Roster(0, 1, 1, ""), 1, 20.0, lambda: 0.0)
    tickets = RequestDedup(attendance, HighWaterMarks())
    peer = Peer(0, 1, "push")

    def exchange(sequence: int, act: Any) -> None:
        message = m.GeoExchange(sequence, 0, 0, [], False)
        tickets.once(peer, message, act, lambda _: (m.Done(), []), keep=False)

    def next_one() -> tuple[m.Message, list[Any]]:
        return m.GeoExchangeReply(1, 1), []

    def slow() -> tuple[m.Message, list[Any]]:
        # its answer was told already to the one that came again, and the next is under way
        tickets._requests[0] = dataclasses.replace(tickets._requests[0], sequence=2)
        return next_one()

    exchange(1, slow)
    assert tickets._requests[0].sequence == 2


def test_a_push_of_an_earlier_life_of_the_server_is_told_once() -> None:
    """It comes twice, and what is told takes what the worker has pulled ahead by then."""
    attendance = PresenceMonitor(Roster(0, 1, 1, ""), 1, 20.0, lambda: 0.0)
    marks, peer = HighWaterMarks(), Peer(0, 1, "push")
    tickets = RequestDedup(attendance, marks)
    told: list[bool] = []

    def ask(sequence: int) -> m.Message:
        def again(is_last: bool) -> tuple[m.Message, list[Any]]:
            told.append(is_last)
            return m.GeoExchangeReply(len(told), 0), []

        message = m.GeoExchange(sequence, 0, 0, [], False)
        reply: m.Message = tickets.once(peer, message, lambda: (m.Done(), []), again)[0]
        return reply

    marks.applied(0, 1, 2)
    assert ask(2) == ask(2) == m.GeoExchangeReply(1, 0)
    # nobody waits for what came before it
    assert ask(1) == m.GeoExchangeReply(2, 0)
    assert told == [True, False]
