# SPDX-License-Identifier: Apache-2.0
"""`RequestDedup`: a push that arrives twice is applied once and gets the same reply twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from fleetlight.errors import ProtocolError
from fleetlight.ps.high_water_marks import HighWaterMarks
from fleetlight.ps.messages import Apply, GeoExchange, Message, Push
from fleetlight.ps.server.workers.presence import PresenceMonitor, again
from fleetlight.ps.server.workers.roster import Peer

Reply = tuple[Message, Sequence[NDArray[Any]]]


@dataclasses.dataclass
class _PushRecord:
    incarnation: int
    sequence: int
    reply: Reply | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.reply is not None or self.error is not None


class RequestDedup:
    """The last push of each worker; it may be in progress when it arrives again."""

    def __init__(self, presence: PresenceMonitor, marks: HighWaterMarks) -> None:
        self._presence = presence
        self._marks = marks
        self._requests: dict[int, _PushRecord] = {}

    def once(
        self,
        peer: Peer,
        message: Push | Apply | GeoExchange,
        carry_out: Callable[[], Reply],
        answer_again: Callable[[bool], Reply],
        keep: bool = True,
    ) -> Reply:
        """Carry it out if it is new; `answer_again` where the first answer is not kept.

        Its argument says whether this is the worker's last push, whose reply it may wait for.
        """
        ticket = _PushRecord(peer.incarnation, message.sequence)
        with self._presence.news:
            # of an epoch that is over not even the answer is told again
            new = self._marks.is_new(peer.worker, peer.incarnation, message.epoch, message.sequence)
            before = self._requests.get(peer.worker)
            if before is not None and _same(before, ticket):
                return self._first_reply(before, peer)
            later = before if before is not None and _number(before) > _number(ticket) else None
            if new and later is not None:
                # its record would replace that of the later push
                raise ProtocolError(
                    f"push {ticket.sequence} of {peer} came after its push {later.sequence}: "
                    "the worker no longer waits for the reply"
                )
            if later is None:
                # also where an earlier incarnation of this server applied it
                self._requests[peer.worker] = ticket
        if later is not None:
            return answer_again(False)
        try:
            return self._carry_out(ticket, carry_out if new else lambda: answer_again(True))
        finally:
            with self._presence.news:
                if not keep and self._requests.get(peer.worker) is ticket:
                    del self._requests[peer.worker]
                self._presence.news.notify_all()

    def _carry_out(self, ticket: _PushRecord, carry_out: Callable[[], Reply]) -> Reply:
        try:
            ticket.reply = carry_out()
        except Exception as error:
            ticket.error = error
            raise
        return ticket.reply

    def _first_reply(self, ticket: _PushRecord, peer: Peer) -> Reply:
        operation = f"push {ticket.sequence} of {peer}, sent again,"
        self._presence.wait(operation, lambda: ticket.done, list)
        if ticket.error is not None:
            raise again(ticket.error)
        assert ticket.reply is not None
        return ticket.reply


def _same(one: _PushRecord, other: _PushRecord) -> bool:
    return _number(one) == _number(other)


def _number(ticket: _PushRecord) -> tuple[int, int]:
    return ticket.incarnation, ticket.sequence
