# SPDX-License-Identifier: Apache-2.0
"""`Dealing`: server 0 deals out the records of loaders, range by range, to whoever asks."""

from __future__ import annotations

from fleetlight.observe.log import logger
from fleetlight.ps.changes import LeaseChanged, LeasesFreed
from fleetlight.ps.messages import (
    Done,
    LeaseProgress,
    LeaseReply,
    LeaseRequest,
    Remaining,
    RemainingRequest,
)
from fleetlight.ps.server.attendance import Attendance
from fleetlight.ps.server.chronicle import Chronicle
from fleetlight.ps.server.ledger import Peer
from fleetlight.ps.server.tickets import Reply
from fleetlight.ps.server.work import Interval, Work, told

#: how often a worker that waits for the end of a turn is told to ask again
_WAIT_S = 1.0


class Dealing:
    """What changes in the work is written down before anybody is told."""

    def __init__(self, attendance: Attendance, chronicle: Chronicle, worker_num: int) -> None:
        self._attendance = attendance
        self._news = attendance.news
        self._chronicle = chronicle
        self.work = Work(worker_num)

    def deal(self, peer: Peer, message: LeaseRequest) -> Reply:
        """The worker's next range."""
        with self._news:
            self._attendance.check()
            self._attendance.roster.check_trains(peer.worker)
            dealt = self._deal(peer, message)
            if dealt is None and message.waits:
                # Others may take long, and no answer may wait for longer than a deadline.
                self._news.wait_for(lambda: self.work.has_news(message), _WAIT_S)
        return (Done() if dealt is None else LeaseReply(*dealt)), []

    def reach(self, peer: Peer, message: LeaseProgress) -> Reply:
        """What the worker has done."""
        with self._news:
            before = self.work.changes
            self.work.reach(peer.worker, message)
            self._note(peer, message, before)
        return Done(), []

    def remain(self, message: RemainingRequest) -> Reply:
        """What is not done yet."""
        with self._news:
            return Remaining(self.work.remaining(message.loader, message.turn)), []

    def leave(self, worker: int) -> None:
        """The worker leaves; called with `news` held."""
        self._free(worker, "has left")

    def lose(self, worker: int) -> None:
        """The worker is lost, and the others go on; called with `news` held."""
        self._free(worker, "was lost")

    def _free(self, worker: int, what: str) -> None:
        # others may be dealt it at once: it lies before what they are told
        self._chronicle.note(LeasesFreed(worker))
        for epoch, intervals in self.work.release(worker):
            logger.warning(
                "worker %d %s with records %s of epoch %d in hand: they are handed out again",
                worker,
                what,
                told(intervals),
                epoch,
            )
        self._news.notify_all()

    def _deal(self, peer: Peer, message: LeaseRequest) -> Interval | None:
        before = self.work.changes
        dealt = self.work.deal(peer.worker, message)
        self._note(peer, message, before)
        return dealt

    def _note(self, peer: Peer, message: LeaseRequest | LeaseProgress, before: int) -> None:
        if self.work.changes != before:
            self._chronicle.note(LeaseChanged(peer.worker, message))
            self._news.notify_all()
