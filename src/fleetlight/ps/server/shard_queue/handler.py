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
from fleetlight.ps.server.shard_queue.shard_queue import Interval, ShardQueue, described
from fleetlight.ps.server.steps.request_dedup import Reply
from fleetlight.ps.server.workers.presence import PresenceMonitor
from fleetlight.ps.server.workers.roster import Peer
from fleetlight.ps.server.write_ahead_log import WriteAheadLog

#: how long a request waits for records before the worker must ask again
_WAIT_S = 1.0


class ShardQueueHandler:
    """Serves the shard queue, and logs each of its changes before the reply."""

    def __init__(self, presence: PresenceMonitor, log: WriteAheadLog, worker_num: int) -> None:
        self._presence = presence
        self._changed = presence.changed
        self._log = log
        self.queue = ShardQueue(worker_num)

    def lease(self, peer: Peer, message: LeaseRequest) -> Reply:
        """Lease the next range to the worker."""
        with self._changed:
            self._presence.check()
            self._presence.roster.check_trains(peer.worker)
            dealt = self._deal(peer, message)
            if dealt is None and message.waits:
                # other workers may take longer than the deadline of a reply
                self._changed.wait_for(lambda: self.queue.has_reply(message), _WAIT_S)
        return (Done() if dealt is None else LeaseReply(*dealt)), []

    def progress(self, peer: Peer, message: LeaseProgress) -> Reply:
        """Record what the worker has finished."""
        with self._changed:
            before = self.queue.changes
            self.queue.reach(peer.worker, message)
            self._note(peer, message, before)
        return Done(), []

    def remaining(self, message: RemainingRequest) -> Reply:
        """The records that are not finished."""
        with self._changed:
            return Remaining(self.queue.remaining(message.loader, message.turn)), []

    def leave(self, worker: int) -> None:
        """The worker leaves; called with `changed` held."""
        self._free(worker, "has left")

    def lose(self, worker: int) -> None:
        """The worker is lost, and the other workers continue; called with `changed` held."""
        self._free(worker, "was lost")

    def _free(self, worker: int, what: str) -> None:
        # logged first: other workers may lease the records at once
        self._log.append(LeasesFreed(worker))
        for epoch, intervals in self.queue.release(worker):
            logger.warning(
                "worker %d %s before it finished records %s of epoch %d; other workers get them",
                worker,
                what,
                described(intervals),
                epoch,
            )
        self._changed.notify_all()

    def _deal(self, peer: Peer, message: LeaseRequest) -> Interval | None:
        before = self.queue.changes
        dealt = self.queue.deal(peer.worker, message)
        self._note(peer, message, before)
        return dealt

    def _note(self, peer: Peer, message: LeaseRequest | LeaseProgress, before: int) -> None:
        if self.queue.changes != before:
            self._log.append(LeaseChanged(peer.worker, message))
            self._changed.notify_all()
