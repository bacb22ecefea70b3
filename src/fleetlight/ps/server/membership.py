# SPDX-License-Identifier: Apache-2.0
"""`WorkerMembership`: the workers that a server is with. They come, meet, leave, and get lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from fleetlight.errors import MembershipError, PeerError, StoppedError
from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.changes import WorkerJoined, WorkerLeft
from fleetlight.ps.server.shard_queue.handler import ShardQueueHandler
from fleetlight.ps.server.steps.pushes import PushHandler
from fleetlight.ps.server.steps.request_dedup import Reply
from fleetlight.ps.server.workers.barriers import Barriers, barrier_change
from fleetlight.ps.server.workers.presence import PresenceMonitor
from fleetlight.ps.server.workers.roster import ABSENT, AWAY, HERE, Peer
from fleetlight.ps.server.write_ahead_log import WriteAheadLog
from fleetlight.ps.transport.interface import Connection

Array = NDArray[Any]


class WorkerMembership:
    """Workers are here before it is known what is trained; from `begin` on they push, too."""

    def __init__(self, presence: PresenceMonitor, log: WriteAheadLog, worker_num: int) -> None:
        self._presence = presence
        self._roster = presence.roster
        self._news = presence.news
        self._log = log
        self.barriers: Barriers[list[Array]] = Barriers(worker_num)
        self.shard_queue = ShardQueueHandler(presence, log, worker_num)
        #: True once a worker has left because the job was asked to stop
        self.stopped = False
        #: who comes to no meeting any more, because the job stops
        self._stopping: set[int] = set()
        self._pushes: PushHandler | None = None
        #: of each worker: it is away once none is left
        self._connections: list[set[Connection]] = [set() for _ in range(worker_num)]

    def begin(self, pushes: PushHandler, *, tolerates_loss: bool) -> None:
        """Start training; workers that left in an earlier incarnation are not expected.

        `tolerates_loss`: nor for those that get lost.
        """
        with self._news:
            self._pushes = pushes
            self._roster.tolerates_loss = tolerates_loss
            gone = self._roster.gone()
        for worker, _, _ in gone:
            self._make_way(worker)

    def greet(self, connection: Connection, message: m.Greeting) -> bool:
        """A worker connects and belongs to this job.

        True when its incarnation is new, which must be on disk before the reply.
        """
        # of a failure the worker is told by its next request: a greeting that fails is tried again
        with self._news:
            lives = self._roster.lives()
            is_another = self._roster.arrive(message)
            is_news = self._roster.lives() != lives and not self._presence.closed
            if is_news:
                self._log.note(WorkerJoined(message.worker, message.incarnation, message.life))
            peer = Peer(message.worker, message.incarnation, message.lane, message.life)
            if is_another and self._pushes is not None:
                self._pushes.forget_ahead(message.worker)
            connection.note = peer
            connection.peer = f"{peer} ({connection.peer})"
            if is_another:
                # those of a process that has died count no more, though some may end later
                self._connections[message.worker].clear()
            self._connections[message.worker].add(connection)
            self._news.notify_all()
        return is_news

    def gone(self, connection: Connection, error: PeerError | None) -> None:
        """A connection has ended."""
        peer = connection.note
        if not isinstance(peer, Peer):
            return
        with self._news:
            connections = self._connections[peer.worker]
            if connection in connections:
                connections.remove(connection)
                self._lose_unconnected(
                    peer.worker, "its connection was closed" if error is None else str(error)
                )

    def hear(self, peer: Peer) -> None:
        """A request has come: whoever was silent or out of reach is there again."""
        if self._roster.is_away(peer.worker):
            with self._news:
                self._roster.come_back(peer.worker, peer.incarnation, peer.life)
                self._news.notify_all()

    def until_all_left(self) -> None:
        """Until every worker has left; raises when one has failed or was lost."""
        self._presence.until_all_left(self._look)

    def _look(self) -> None:
        """Give up workers that did not come back; the others continue where that is allowed."""
        with self._news:
            # not every end of a connection is reported: a request may be in progress on it
            for worker in self._roster.those(HERE):
                self._lose_unconnected(worker, "its connection was closed")
            self._presence.lose_silent()
            if not self._presence.overdue():
                return
        # a snapshot finds it written down behind it, or the worker gone
        with self._log.turn:
            with self._news:
                lost = self._presence.give_up()
                for worker, _ in lost:
                    self.shard_queue.lose(worker)
                    self._note_gone(worker, lost=True)
            self._log.settle()
        for worker, why in lost:
            logger.warning("%s; the other workers continue without it", why)
            self._make_way(worker)

    def _note_gone(self, worker: int, *, lost: bool) -> None:
        self._log.note(WorkerLeft(worker, self._roster.incarnation(worker), lost))

    def _lose_unconnected(self, worker: int, why: str) -> None:
        """A process that has died has no connection left; called with `news` held."""
        if all(connection.has_ended() for connection in self._connections[worker]):
            self._presence.lose(worker, why)

    def heartbeat(self, peer: Peer, message: m.Heartbeat) -> Reply:
        """A worker is alive, and reports its step."""
        self._presence.at_step(peer.worker, message.step)
        self._presence.check()
        with self._news:
            self._presence.call_for(message.call)
            if message.stops:
                self._stop(peer.worker)
            here = len(self._roster.those(ABSENT, HERE, AWAY))
        return m.HeartbeatAck(self._presence.call, here), []

    def barrier(self, peer: Peer, message: m.Barrier, arrays: Sequence[Array]) -> Reply:
        """A worker waits for all others."""
        meeting = message.meeting
        with self._news:
            self._presence.check()
            try:
                with self._noting_meetings():
                    self.barriers.enter(peer.worker, meeting, message.operation, list(arrays))
                self._presence.wait(
                    message.operation,
                    lambda: self.barriers.result(meeting) is not None,
                    lambda: self._missing(peer, message),
                    message.deadline_s,
                )
            except PeerError as error:
                # a worker that arrives later must not believe that the barrier is complete
                self.barriers.give_up(error)
                self._news.notify_all()
                raise
            brought = self.barriers.result(meeting) or []
        return m.BarrierReply(), [array for arrays_ in brought for array in arrays_]

    @contextlib.contextmanager
    def _noting_meetings(self) -> Iterator[None]:
        """A meeting may become complete meanwhile; called with `news` held."""
        before = self.barriers.last
        yield
        after = self.barriers.last
        if after is not None and after is not before:
            self._log.note(*barrier_change(*after))
        self._news.notify_all()

    def _missing(self, peer: Peer, message: m.Barrier) -> list[int]:
        """Who has not come; an error when one never will, who stops or waits for this worker."""
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

    def leave(self, peer: Peer, message: m.Leave) -> Reply:
        """A worker leaves; a failed worker ends the job, unless the others may continue."""
        goes = not message.error or (self._roster.tolerates_loss and peer.worker != 0)
        # a snapshot finds it written down behind it, or the worker gone
        with self._log.turn:
            if goes and not self._roster.is_lost(peer.worker):
                # once the last one has left nothing is written any more
                self._note_leaving(peer.worker, message)
                self._log.settle()
            with self._news:
                if message.stopped:
                    self.stopped = True
                    self._stop(peer.worker)
                self._presence.leave(peer.worker, message.error)
        if message.error:
            logger.warning("%s failed: %s", peer, message.error)
        if goes:
            if message.error:
                logger.warning("%s failed; the other workers continue without it", peer)
            self._make_way(peer.worker)
        return m.Done(), []

    def confirm(self, peer: Peer) -> Reply:
        """A worker that has left knows that all have heard it."""
        with self._news:
            self._roster.confirm(peer.worker)
            self._news.notify_all()
        return m.Done(), []

    def _stop(self, worker: int) -> None:
        """The worker stops, or has: who waits for it is told; called with `news` held."""
        self._stopping.add(worker)
        self._news.notify_all()

    def _note_leaving(self, worker: int, message: m.Leave) -> None:
        with self._news:
            if message.error:
                self.shard_queue.lose(worker)
            else:
                self.shard_queue.leave(worker)
            self._note_gone(worker, lost=False)

    def _make_way(self, worker: int) -> None:
        """Complete what waits for the worker; a worker that stops breaks its barriers."""
        if self._roster.tolerates_loss and worker not in self._stopping:
            with self._news, self._noting_meetings():
                self.barriers.leave(worker)
        if self._pushes is not None:
            self._pushes.leave(worker)
