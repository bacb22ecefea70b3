# SPDX-License-Identifier: Apache-2.0
"""`WorkerMembership`: workers connect to a server, meet at barriers, leave or are lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from fleetlight.errors import MembershipError, PeerError, PlanError, StoppedError, counted
from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.changes import WorkerEntered, WorkerJoined, WorkerLeft
from fleetlight.ps.server.shard_queue.handler import ShardQueueHandler
from fleetlight.ps.server.steps.pushes import PushHandler
from fleetlight.ps.server.steps.request_dedup import Reply
from fleetlight.ps.server.workers.barriers import Barriers, barrier_change
from fleetlight.ps.server.workers.presence import PresenceMonitor
from fleetlight.ps.server.workers.roster import HERE, Peer
from fleetlight.ps.server.write_ahead_log import WriteAheadLog
from fleetlight.ps.transport.interface import Connection

Array = NDArray[Any]

#: how long a request for the prelude waits before the worker must ask again
_PRELUDE_S = 1.0


class WorkerMembership:
    """The workers of one server; they may connect before `begin`, and push after it."""

    def __init__(
        self,
        presence: PresenceMonitor,
        log: WriteAheadLog,
        worker_num: int,
        worker_max: int | None = None,
    ) -> None:
        self._presence = presence
        self._roster = presence.roster
        self._changed = presence.changed
        self._barrier_ended = presence.condition()
        self._log = log
        self.barriers: Barriers[list[Array]] = Barriers(worker_num, worker_max)
        self.shard_queue = ShardQueueHandler(presence, log, worker_num, worker_max)
        #: True once a worker has left because the job was asked to stop
        self.stopped = False
        #: workers that enter no more barriers, because the job stops
        self._stopping: set[int] = set()
        self._pushes: PushHandler | None = None
        #: open connections by worker; a worker without one is away
        self._connections: list[set[Connection]] = [set() for _ in range(worker_max or worker_num)]

    def begin(self, pushes: PushHandler, *, tolerates_loss: bool) -> None:
        """Start training without the workers that left an earlier incarnation of the server.

        `tolerates_loss`: the job continues without lost workers, too.
        """
        with self._changed:
            self._pushes = pushes
            self._roster.tolerates_loss |= tolerates_loss
            gone = [worker for worker, _, _ in self._roster.gone()]
            # a worker that joins in the place of one that has left takes part in nothing yet
            absent = gone + self._roster.joining()
        for worker in absent:
            self._complete_without(worker)

    def greet(self, connection: Connection, message: m.Greeting) -> bool:
        """A worker connects and belongs to this job.

        True when its incarnation is new. It must be on disk before the reply.
        """
        # the next request reports a failure; a worker would retry a greeting that fails
        with self._changed:
            arrivals = self._roster.arrivals()
            is_new_process = self._roster.started_at(message.worker) != message.started_at
            is_another = self._roster.arrive(message)
            is_new = self._roster.arrivals() != arrivals and not self._presence.closed
            if is_new:
                self._log.append(
                    WorkerJoined(message.worker, message.started_at, message.incarnation)
                )
            peer = Peer(message.worker, message.started_at, message.lane, message.incarnation)
            if is_another and self._pushes is not None:
                self._pushes.forget_prefetched(message.worker)
            connection.note = peer
            connection.peer = f"{peer} ({connection.peer})"
            if is_another or is_new_process:
                # connections of the dead process no longer count, even if they end later
                self._connections[message.worker].clear()
            self._connections[message.worker].add(connection)
            self._changed.notify_all()
        return is_new

    def gone(self, connection: Connection, error: PeerError | None) -> None:
        """A connection has ended."""
        peer = connection.note
        if not isinstance(peer, Peer):
            return
        with self._changed:
            connections = self._connections[peer.worker]
            if connection in connections:
                connections.remove(connection)
                self._lose_unconnected(
                    peer.worker, "its connection was closed" if error is None else str(error)
                )

    def mark_present(self, peer: Peer) -> None:
        """Mark a worker that was away as present, because it sent a request."""
        if self._roster.is_away(peer.worker):
            with self._changed:
                self._roster.come_back(peer.worker, peer.started_at, peer.incarnation)
                self._changed.notify_all()

    def until_all_left(self) -> None:
        """Wait until every worker has left; raise if a worker failed or was lost."""
        self._presence.until_all_left(self._look)

    def _look(self) -> None:
        """Give up workers that did not return; the job may continue without them."""
        with self._changed:
            # the transport does not report a connection that ends during a request
            for worker in self._roster.in_state(HERE):
                self._lose_unconnected(worker, "its connection was closed")
            self._presence.lose_silent()
            if not self._presence.overdue():
                return
        # a snapshot shows the worker as gone, or the record comes after the snapshot
        with self._log.lock:
            with self._changed:
                lost = self._presence.give_up()
                for worker, _ in lost:
                    self._note_gone(worker, lost=True)
                    self.shard_queue.lose(worker)
            self._log.wait_on_disk()
        for worker, why in lost:
            logger.warning("%s; the other workers continue without it", why)
            self._complete_without(worker)

    def _note_gone(self, worker: int, *, lost: bool) -> None:
        """Log it before its leases are freed: one record, so that a restart knows both or none."""
        self._log.append(WorkerLeft(worker, self._roster.started_at(worker), lost))

    def _lose_unconnected(self, worker: int, why: str) -> None:
        """Lose a worker without an open connection; called with `changed` held."""
        if all(connection.has_ended() for connection in self._connections[worker]):
            self._presence.lose(worker, why)

    def heartbeat(self, peer: Peer, message: m.Heartbeat) -> Reply:
        """Record the step and the control signal of a worker."""
        self._presence.at_step(peer.worker, message.step)
        self._presence.check()
        with self._changed:
            self._presence.call_for(message.call)
            if message.stops:
                self._stop(peer.worker)
            here = self._roster.active
        return m.HeartbeatAck(self._presence.call, here), []

    def barrier(self, peer: Peer, message: m.Barrier, arrays: Sequence[Array]) -> Reply:
        """Wait until all workers enter the barrier; return the arrays of each."""
        meeting = message.meeting
        with self._changed:
            self._presence.check()
            # a late request of a broken connection gets an error, which concerns no other worker
            with self._logging_barrier():
                self.barriers.enter(peer.worker, meeting, message.operation, list(arrays))
            try:
                self._presence.wait(
                    message.operation,
                    lambda: self.barriers.result(meeting) is not None,
                    lambda: self._missing(peer, message),
                    message.deadline_s,
                    until=self._barrier_ended,
                )
            except PeerError as error:
                # a worker that arrives later must not believe that the barrier is complete
                self.barriers.give_up(error)
                self._presence.notify_all()
                raise
            values = self.barriers.result(meeting) or []
        return m.BarrierReply(), [array for arrays_ in values for array in arrays_]

    @contextlib.contextmanager
    def _logging_barrier(self) -> Iterator[None]:
        """Log the barrier that the block completes, if any; called with `changed` held."""
        before = self.barriers.last
        yield
        after = self.barriers.last
        if after is not None and after is not before:
            is_prelude = self.barriers.is_prelude
            self._log.append(*barrier_change(*after, is_prelude=is_prelude))
            self._barrier_ended.notify_all()

    def _missing(self, peer: Peer, message: m.Barrier) -> list[int]:
        """Workers that have not entered; an error if one stops or waits for this worker."""
        missing = self.barriers.missing(message.meeting)
        stopping = [worker for worker in missing if worker in self._stopping]
        if stopping:
            raise StoppedError(
                f"{message.operation} would wait for worker {stopping[0]}, which stops because the "
                "job was asked to stop; stop this worker, too"
            )
        for worker in missing:
            if peer.worker in self.shard_queue.queue.waits_for(worker):
                raise MembershipError(
                    f"{message.operation} of {peer} would wait for worker {worker}, which has no "
                    f"records left and waits for those that {peer} has leased; with deal='queue' "
                    "workers have different numbers of batches: call it after the loop over them"
                )
        if self._pushes is not None:
            for worker in missing:
                awaited = self._pushes.awaited_by(worker)
                if any(peer.worker in workers for workers in awaited.values()):
                    raise MembershipError(
                        f"{message.operation} of {peer} would wait for worker {worker}, which "
                        f"waits for {peer} in a step; call fleet.barrier_worker() first when "
                        "workers have different numbers of steps"
                    )
        return missing

    def lease(self, peer: Peer, message: m.LeaseRequest) -> Reply:
        """Lease records to the worker; the prelude is complete."""
        self.barriers.has_begun = True
        return self.shard_queue.lease(peer, message)

    def enter(self, peer: Peer, message: m.Enter, *, holds_turn: bool) -> Reply:
        """A worker takes part from a phase on, or asks again; `holds_turn`: on server 0."""
        with self._changed:
            self._presence.check()
            # the request of a worker that has died may be handled after its loss
            self._roster.check_trains(peer.worker)
            pushes = self._pushes
            if pushes is None:
                raise PlanError("the server has no plan yet; send Join before other requests")
            if holds_turn and not self.shard_queue.enter(peer, message):
                return m.Entered(is_member=False), []
            if not self._roster.has_entered(peer.worker, peer.started_at):
                pushes.enter(peer.worker, message.phase)
                self._roster.enter(peer.worker)
                self.barriers.join(peer.worker)
                self.shard_queue.queue.join(peer.worker)
                self._log.append(WorkerEntered(peer.worker, peer.started_at, message.phase))
            self._changed.notify_all()
        if holds_turn:
            active = counted(self._roster.active, "worker")
            logger.info("%s joins: %s from now on; learning rates stay", peer, active)
        return m.Entered(is_member=True), []

    def prelude(self) -> Reply:
        """The results of all barriers before the first lease, for a worker that joins."""
        with self._changed:
            self._presence.check()
            if not self._roster.active:
                return m.Admitted(0, is_over=True), []
            if not self._changed.wait_for(lambda: self.barriers.has_begun, _PRELUDE_S):
                return m.Done(), []
            known = self.barriers.prelude
        values = [[array for arrays in each for array in arrays] for _, _, each in known]
        return (
            m.Prelude([operation for _, operation, _ in known], [len(one) for one in values]),
            [array for one in values for array in one],
        )

    def leave(self, peer: Peer, message: m.Leave) -> Reply:
        """A worker leaves; a failed worker ends the job, unless the others may continue."""
        goes = not message.error or (self._roster.tolerates_loss and peer.worker != 0)
        # a snapshot shows the worker as gone, or the record comes after the snapshot
        with self._log.lock:
            if goes and not self._roster.is_lost(peer.worker):
                # the server writes no record after the last worker has left
                self._note_leaving(peer.worker, message)
                self._log.wait_on_disk()
            with self._changed:
                if message.stopped:
                    self.stopped = True
                    self._stop(peer.worker)
                self._presence.leave(peer.worker, message.error)
        if message.error:
            logger.warning("%s failed: %s", peer, message.error)
        if goes:
            if message.error:
                logger.warning("%s failed; the other workers continue without it", peer)
            self._complete_without(peer.worker)
        return m.Done(), []

    def confirm(self, peer: Peer) -> Reply:
        """A worker that has left has the replies of all servers to its goodbye."""
        with self._changed:
            self._roster.confirm(peer.worker)
            self._changed.notify_all()
        return m.Done(), []

    def _stop(self, worker: int) -> None:
        """Note that the worker stops, and wake the waits for it; called with `changed` held."""
        self._stopping.add(worker)
        self._barrier_ended.notify_all()

    def _note_leaving(self, worker: int, message: m.Leave) -> None:
        with self._changed:
            self._note_gone(worker, lost=False)
            if message.error:
                self.shard_queue.lose(worker)
            else:
                self.shard_queue.leave(worker)

    def _complete_without(self, worker: int) -> None:
        """Complete steps, and barriers if the job tolerates loss, without the worker."""
        if self._roster.tolerates_loss and worker not in self._stopping:
            with self._changed, self._logging_barrier():
                self.barriers.leave(worker)
        if self._pushes is not None:
            self._pushes.leave(worker)
