# SPDX-License-Identifier: Apache-2.0
"""`ShardQueueHandler`: server 0 leases ranges of a loader's records to workers."""

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
from fleetlight.ps.server.shard_queue.shard_queue import Interval, ShardQueue, told
from fleetlight.ps.server.steps.request_dedup import Reply
from fleetlight.ps.server.workers.presence import PresenceMonitor
from fleetlight.ps.server.workers.roster import Peer
from fleetlight.ps.server.write_ahead_log import WriteAheadLog

#: how often a worker that waits for the end of a turn is told to ask again
_WAIT_S = 1.0


class ShardQueueHandler:
    """Every change of the queue is logged before a reply."""

    def __init__(self, presence: PresenceMonitor, log: WriteAheadLog, worker_num: int) -> None:
        self._presence = presence
        self._news = presence.news
        self._log = log
        self.queue = ShardQueue(worker_num)

    def lease(self, peer: Peer, message: LeaseRequest) -> Reply:
        """The worker's next range."""
        with self._news:
            self._presence.check()
            self._presence.roster.check_trains(peer.worker)
            dealt = self._deal(peer, message)
            if dealt is None and message.waits:
                # Others may take long, and no answer may wait for longer than a deadline.
                self._news.wait_for(lambda: self.queue.has_news(message), _WAIT_S)
        return (Done() if dealt is None else LeaseReply(*dealt)), []

    def progress(self, peer: Peer, message: LeaseProgress) -> Reply:
        """What the worker has done."""
        with self._news:
            before = self.queue.changes
            self.queue.reach(peer.worker, message)
            self._note(peer, message, before)
        return Done(), []

    def remaining(self, message: RemainingRequest) -> Reply:
        """What is not done yet."""
        with self._news:
            return Remaining(self.queue.remaining(message.loader, message.turn)), []

    def leave(self, worker: int) -> None:
        """The worker leaves; called with `news` held."""
        self._free(worker, "has left")

    def lose(self, worker: int) -> None:
        """The worker is lost, and the others continue; called with `news` held."""
        self._free(worker, "was lost")

    def _free(self, worker: int, what: str) -> None:
        # others may be dealt it at once: it lies before what they are told
        self._log.note(LeasesFreed(worker))
        for epoch, intervals in self.queue.release(worker):
            logger.warning(
                "worker %d %s before it finished records %s of epoch %d; other workers get them",
                worker,
                what,
                told(intervals),
                epoch,
            )
        self._news.notify_all()

    def _deal(self, peer: Peer, message: LeaseRequest) -> Interval | None:
        before = self.queue.changes
        dealt = self.queue.deal(peer.worker, message)
        self._note(peer, message, before)
        return dealt

    def _note(self, peer: Peer, message: LeaseRequest | LeaseProgress, before: int) -> None:
        if self.queue.changes != before:
            self._log.note(LeaseChanged(peer.worker, message))
            self._news.notify_all()
