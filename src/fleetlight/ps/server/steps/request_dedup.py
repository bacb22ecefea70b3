# SPDX-License-Identifier: Apache-2.0
"""`RequestDedup`: a repeated push is applied once and gets the same reply."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from fleetlight.errors import ProtocolError
from fleetlight.ps.high_water_marks import HighWaterMarks
from fleetlight.ps.messages import Apply, GeoExchange, Message, Push
from fleetlight.ps.server.workers.presence import PresenceMonitor, copied_for_thread
from fleetlight.ps.server.workers.roster import Peer

Reply = tuple[Message, Sequence[NDArray[Any]]]


@dataclasses.dataclass
class _PushRecord:
    started_at: int
    sequence: int
    reply: Reply | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.reply is not None or self.error is not None


class RequestDedup:
    """The last push of each worker, which may be in progress when its repetition arrives."""

    def __init__(self, presence: PresenceMonitor, marks: HighWaterMarks) -> None:
        self._presence = presence
        self._marks = marks
        self._is_done = presence.condition()
        self._requests: dict[int, _PushRecord] = {}

    def once(
        self,
        peer: Peer,
        message: Push | Apply | GeoExchange,
        carry_out: Callable[[], Reply],
        repeat_reply: Callable[[bool], Reply],
        keep: bool = True,
    ) -> Reply:
        """Run `carry_out` for a new push, else return the kept reply or call `repeat_reply`.

        The argument of `repeat_reply` is True for the worker's last push.
        """
        push = _PushRecord(peer.started_at, message.sequence)
        with self._presence.changed:
            # `is_new` raises for a push of an earlier epoch
            new = self._marks.is_new(peer.worker, peer.started_at, message.epoch, message.sequence)
            before = self._requests.get(peer.worker)
            if before is not None and _same(before, push):
                return self._first_reply(before, peer)
            later = before if before is not None and _number(before) > _number(push) else None
            if new and later is not None:
                # its record would replace that of the later push
                raise ProtocolError(
                    f"push {push.sequence} of {peer} arrived after its push {later.sequence}: "
                    "the worker no longer waits for the reply"
                )
            if later is None:
                # also if an earlier incarnation of this server applied the push
                self._requests[peer.worker] = push
        if later is not None:
            return repeat_reply(False)
        try:
            return self._carry_out(push, carry_out if new else lambda: repeat_reply(True))
        finally:
            with self._presence.changed:
                if not keep and self._requests.get(peer.worker) is push:
                    del self._requests[peer.worker]
                self._is_done.notify_all()

    def _carry_out(self, push: _PushRecord, carry_out: Callable[[], Reply]) -> Reply:
        try:
            push.reply = carry_out()
        except Exception as error:
            push.error = error
            raise
        return push.reply

    def _first_reply(self, push: _PushRecord, peer: Peer) -> Reply:
        operation = f"push {push.sequence} of {peer}, sent again,"
        self._presence.wait(operation, lambda: push.done, list, until=self._is_done)
        if push.error is not None:
            raise copied_for_thread(push.error)
        assert push.reply is not None
        return push.reply


def _same(one: _PushRecord, other: _PushRecord) -> bool:
    return _number(one) == _number(other)


def _number(push: _PushRecord) -> tuple[int, int]:
    return push.started_at, push.sequence
