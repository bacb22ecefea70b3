# SPDX-License-Identifier: Apache-2.0
"""RequestDedup: a late push over an abandoned connection does not disturb newer ones."""

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


def test_a_late_push_does_not_hide_a_later_request() -> None:
    server = opened(plan("sync"))
    first, second = team(server)
    held = [worker.push_request(0, {0: None}, None, hold=True) for worker in (first, second)]
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
        # the push is repeated long after its reply, and then the factor, too
        with pytest.raises(ProtocolError, match="push 0 of worker 1 arrived after its push 1"):
            second.send(held[1], GRADIENTS, None)
        second.sequence -= 1
        reply_again = pool.submit(second.apply, 0, 0.5)
        first.apply(0, 0.5)
        for reply in (early.result(20), reply_again.result(20)):
            assert reply[0].applied
    assert first.pull(0, [1]) == [-2]
    server.close()


def _waits(server: Server) -> bool:
    assert server._service is not None
    with server._changed:
        return bool(server._service.pushes.awaited_by(1))


def test_a_finished_request_forgets_only_its_own_record() -> None:
    presence = PresenceMonitor(Roster(0, 1, 1, ""), 1, 20.0, lambda: 0.0)
    dedup = RequestDedup(presence, HighWaterMarks())
    peer = Peer(0, 1, "push")

    def exchange(sequence: int, act: Any) -> None:
        message = m.GeoExchange(sequence, 0, 0, [], False)
        dedup.once(peer, message, act, lambda _: (m.Done(), []), keep=False)

    def next_one() -> tuple[m.Message, list[Any]]:
        return m.GeoExchangeReply(1, 1), []

    def slow() -> tuple[m.Message, list[Any]]:
        # the repeated request already has the reply, and the next one is in progress
        dedup._requests[0] = dataclasses.replace(dedup._requests[0], sequence=2)
        return next_one()

    exchange(1, slow)
    assert dedup._requests[0].sequence == 2


def test_a_push_from_before_a_restart_is_answered_once() -> None:
    """It arrives twice, but its reply consumes the rows that the worker has prefetched."""
    presence = PresenceMonitor(Roster(0, 1, 1, ""), 1, 20.0, lambda: 0.0)
    marks, peer = HighWaterMarks(), Peer(0, 1, "push")
    dedup = RequestDedup(presence, marks)
    calls: list[bool] = []

    def ask(sequence: int) -> m.Message:
        def reply_again(is_last: bool) -> tuple[m.Message, list[Any]]:
            calls.append(is_last)
            return m.GeoExchangeReply(len(calls), 0), []

        message = m.GeoExchange(sequence, 0, 0, [], False)
        reply: m.Message = dedup.once(peer, message, lambda: (m.Done(), []), reply_again)[0]
        return reply

    marks.applied(0, 1, 2)
    assert ask(2) == ask(2) == m.GeoExchangeReply(1, 0)
    # no worker waits for the push before it
    assert ask(1) == m.GeoExchangeReply(2, 0)
    assert calls == [True, False]
