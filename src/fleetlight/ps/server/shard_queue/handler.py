# SPDX-License-Identifier: Apache-2.0
"""`ShardQueueHandler`: server 0 leases ranges of a loader's records to workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.changes import LeaseChanged, TurnCut, WorkerEnteredAll
from fleetlight.ps.messages import (
    Done,
    LeaseProgress,
    LeaseReply,
    LeaseRequest,
    Remaining,
    RemainingRequest,
)
from fleetlight.ps.server.shard_queue.admissions import Turn
from fleetlight.ps.server.shard_queue.shard_queue import (
    NOTHING,
    Interval,
    ShardQueue,
    described,
)
from fleetlight.ps.server.steps.request_dedup import Reply
from fleetlight.ps.server.workers.presence import PresenceMonitor
from fleetlight.ps.server.workers.roster import Peer
from fleetlight.ps.server.write_ahead_log import WriteAheadLog

#: how long a request waits for records before the worker must ask again
_WAIT_S = 1.0


class ShardQueueHandler:
    """Serves the shard queue, and logs each of its changes before the reply."""

    def __init__(
        self,
        presence: PresenceMonitor,
        log: WriteAheadLog,
        worker_num: int,
        worker_max: int | None = None,
    ) -> None:
        self._presence = presence
        self._changed = presence.changed
        self._log = log
        self.queue = ShardQueue(worker_num, worker_max)
        #: the state of worker 0 at the turn that is offered to workers that join
        self._state: Sequence[NDArray[Any]] = ()

    def lease(self, peer: Peer, message: LeaseRequest) -> Reply:
        """Lease the next range to the worker."""
        with self._changed:
            self._presence.check()
            self._presence.roster.check_trains(peer.worker)
            if self._presence.roster.is_elastic:
                turn = message.loader, message.turn
                if self._hold(turn):
                    return self._held(peer, turn), []
                self._begin(turn)
            dealt = self._deal(peer, message)
            if dealt is None and message.waits:
                # other workers may take longer than the deadline of a reply
                self._changed.wait_for(lambda: self.queue.has_reply(message), _WAIT_S)
            left = self.queue.left(message.loader, message.turn) if dealt == NOTHING else []
            roster = self._presence.roster
            active = roster.active if roster.is_elastic else 0
        return (Done() if dealt is None else LeaseReply(*dealt, left, active)), []

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
        """The worker leaves, and the log says so; called with `changed` held."""
        self._free(worker, "has left")

    def lose(self, worker: int) -> None:
        """The worker is lost, and the log says so; called with `changed` held."""
        self._free(worker, "was lost")

    # -- workers that join

    def admit(self, peer: Peer, message: m.Admit) -> Reply:
        """Return the state at the start of a turn to a worker that joins."""
        with self._changed:
            self._presence.check()
            if not self._presence.roster.active:
                return m.Admitted(0, is_over=True), []
            if self.queue.may_cut(message.loader):
                self.queue.cut(message.loader)
                self._log.append(TurnCut(message.loader))
                self._changed.notify_all()

            def offered() -> tuple[int, int] | None:
                # it may be lost meanwhile, and then no turn is held for it
                self._presence.roster.check_trains(peer.worker)
                return self.queue.admissions.wait(peer.worker, message.loader)

            if not self._changed.wait_for(lambda: offered() is not None, _WAIT_S):
                return Done(), []
            turn = offered()
            assert turn is not None
            return m.Admitted(turn[1]), list(self._state)

    def offer(self, message: m.OfferState, arrays: Sequence[NDArray[Any]]) -> Reply:
        """Worker 0 sends its state; without arrays, no worker can join at this turn."""
        turn = message.loader, message.turn
        with self._changed:
            if not arrays:
                self.queue.admissions.skip(turn)
                logger.warning(
                    "no worker can join here: worker 0 is inside another loop, or has no state to "
                    "offer (its log says which); workers that join wait for the next loop"
                )
            elif self.queue.is_unleased(*turn):
                self._state = [array.copy() for array in arrays]
                self.queue.admissions.offer(turn)
            self._changed.notify_all()
        return Done(), []

    def enter(self, peer: Peer, message: m.Enter) -> bool:
        """True if the worker may take part; called with `changed` held."""
        turn = message.loader, message.turn
        return self.queue.admissions.enter(peer.worker, turn)

    def entered_all(self, peer: Peer) -> Reply:
        """All servers know the worker."""
        with self._changed:
            self.queue.admissions.entered(peer.worker)
            self._log.append(WorkerEnteredAll(peer.worker))
            self._changed.notify_all()
        return Done(), []

    def _hold(self, turn: Turn) -> bool:
        """Hold a turn at whose start workers join."""
        return self.queue.is_unleased(*turn) and self.queue.admissions.hold(
            turn, self._presence.now()
        )

    def _begin(self, turn: Turn) -> None:
        """The turn begins: no worker takes its state any more."""
        if self.queue.is_unleased(*turn):
            self.queue.admissions.begin(turn)
            self._state = ()

    def _held(self, peer: Peer, turn: Turn) -> m.Held:
        """Let the worker ask again, worker 0 with its state."""
        if peer.worker == 0 and self.queue.admissions.wants_state(turn):
            return m.Held(wants_state=True)
        self._changed.wait_for(lambda: not self._hold(turn), _WAIT_S)
        return m.Held()

    def _free(self, worker: int, what: str) -> None:
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
