# SPDX-License-Identifier: Apache-2.0
"""`Company`: the workers that a server is with. They come, meet, leave, and get lost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from fleetlight.errors import MembershipError, PeerError, StoppedError
from fleetlight.observe.log import logger
from fleetlight.ps import messages as m
from fleetlight.ps.changes import WorkerJoined, WorkerLeft
from fleetlight.ps.server.attendance import Attendance
from fleetlight.ps.server.chronicle import Chronicle
from fleetlight.ps.server.dealing import Dealing
from fleetlight.ps.server.kept import met_change
from fleetlight.ps.server.ledger import Peer
from fleetlight.ps.server.meetings import Meetings
from fleetlight.ps.server.pushes import Pushes
from fleetlight.ps.server.roster import ABSENT, AWAY, HERE
from fleetlight.ps.server.tickets import Reply
from fleetlight.ps.transport.interface import Connection

Array = NDArray[Any]


class Company:
    """Workers are here before it is known what is trained; from `begin` on they push, too."""

    def __init__(self, attendance: Attendance, chronicle: Chronicle, worker_num: int) -> None:
        self._attendance = attendance
        self._roster = attendance.roster
        self._news = attendance.news
        self._chronicle = chronicle
        self.meetings: Meetings[list[Array]] = Meetings(worker_num)
        self.dealing = Dealing(attendance, chronicle, worker_num)
        #: True once a worker has left because the job was asked to stop
        self.stopped = False
        #: who comes to no meeting any more, because the job stops
        self._stopping: set[int] = set()
        self._pushes: Pushes | None = None
        #: of each worker: it is away once none is left
        self._connections: list[set[Connection]] = [set() for _ in range(worker_num)]

    def begin(self, pushes: Pushes, *, goes_on: bool) -> None:
        """What is trained is known; nobody waits for those that left in an earlier life.

        `goes_on`: nor for those that get lost.
        """
        with self._news:
            self._pushes = pushes
            self._roster.goes_on = goes_on
            gone = self._roster.gone()
        for worker, _, _ in gone:
            self._make_way(worker)

    def greet(self, connection: Connection, message: m.Greeting) -> bool:
        """Somebody says hello, and belongs here.

        True when it, or this life of it, is new: that is to be settled before it hears an answer.
        """
        # of a failure the worker is told by its next request: a greeting that fails is tried again
        with self._news:
            lives = self._roster.lives()
            is_another = self._roster.arrive(message)
            is_news = self._roster.lives() != lives and not self._attendance.closed
            if is_news:
                self._chronicle.note(
                    WorkerJoined(message.worker, message.incarnation, message.life)
                )
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
        self._attendance.until_all_left(self._look)

    def _look(self) -> None:
        """Those that do not come back are lost; where that ends nothing, the others go on."""
        with self._news:
            # not every end of a connection is told: a request may be under way on it
            for worker in self._roster.those(HERE):
                self._lose_unconnected(worker, "its connection was closed")
            self._attendance.lose_silent()
            if not self._attendance.overdue():
                return
        # a snapshot finds it written down behind it, or the worker gone
        with self._chronicle.turn:
            with self._news:
                lost = self._attendance.give_up()
                for worker, _ in lost:
                    self.dealing.lose(worker)
                    self._note_gone(worker, lost=True)
            self._chronicle.settle()
        for worker, why in lost:
            logger.warning("%s; the others go on without it", why)
            self._make_way(worker)

    def _note_gone(self, worker: int, *, lost: bool) -> None:
        self._chronicle.note(WorkerLeft(worker, self._roster.incarnation(worker), lost))

    def _lose_unconnected(self, worker: int, why: str) -> None:
        """A process that has died has no connection left; called with `news` held."""
        if all(connection.has_ended() for connection in self._connections[worker]):
            self._attendance.lose(worker, why)

    def beat(self, peer: Peer, message: m.Heartbeat) -> Reply:
        """A sign of life."""
        self._attendance.at_step(peer.worker, message.step)
        self._attendance.check()
        with self._news:
            self._attendance.call_for(message.call)
            if message.stops:
                self._stop(peer.worker)
            here = len(self._roster.those(ABSENT, HERE, AWAY))
        return m.HeartbeatAck(self._attendance.call, here), []

    def meet(self, peer: Peer, message: m.Barrier, arrays: Sequence[Array]) -> Reply:
        """A worker waits for all others."""
        meeting = message.meeting
        with self._news:
            self._attendance.check()
            try:
                with self._noting_meetings():
                    self.meetings.enter(peer.worker, meeting, message.operation, list(arrays))
                self._attendance.wait(
                    message.operation,
                    lambda: self.meetings.result(meeting) is not None,
                    lambda: self._missing(peer, message),
                    message.deadline_s,
                )
            except PeerError as error:
                # who comes later must not believe that everybody is there
                self.meetings.give_up(error)
                self._news.notify_all()
                raise
            brought = self.meetings.result(meeting) or []
        return m.BarrierReply(), [array for arrays_ in brought for array in arrays_]

    @contextlib.contextmanager
    def _noting_meetings(self) -> Iterator[None]:
        """A meeting may become complete meanwhile; called with `news` held."""
        before = self.meetings.last
        yield
        after = self.meetings.last
        if after is not None and after is not before:
            self._chronicle.note(*met_change(*after))
        self._news.notify_all()

    def _missing(self, peer: Peer, message: m.Barrier) -> list[int]:
        """Who has not come; an error when one never will, who stops or waits for this worker."""
        missing = self.meetings.missing(message.meeting)
        stopping = [worker for worker in missing if worker in self._stopping]
        if stopping:
            raise StoppedError(
                f"{message.operation} would wait for worker {stopping[0]}, which stops: the job "
                "was asked to, and this worker is to stop, too"
            )
        for worker in missing:
            if peer.worker in self.dealing.work.waits_for(worker):
                raise MembershipError(
                    f"{message.operation} of {peer} would wait for worker {worker}, which has no "
                    f"records left and waits for those that {peer} has in hand; with deal='queue' "
                    "workers have different numbers of batches: call it behind the loop over them"
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
        """A worker says goodbye; one that has failed is missed, unless the others go on."""
        goes = not message.error or (self._roster.goes_on and peer.worker != 0)
        # a snapshot finds it written down behind it, or the worker gone
        with self._chronicle.turn:
            if goes and not self._roster.is_lost(peer.worker):
                # once the last one has left nothing is written any more
                self._note_leaving(peer.worker, message)
                self._chronicle.settle()
            with self._news:
                if message.stopped:
                    self.stopped = True
                    self._stop(peer.worker)
                self._attendance.leave(peer.worker, message.error)
        if message.error:
            logger.warning("%s failed: %s", peer, message.error)
        if goes:
            if message.error:
                logger.warning("%s failed; the others go on without it", peer)
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
                self.dealing.lose(worker)
            else:
                self.dealing.leave(worker)
            self._note_gone(worker, lost=False)

    def _make_way(self, worker: int) -> None:
        """Nobody waits for the worker any more; for one that stops a meeting is over."""
        if self._roster.goes_on and worker not in self._stopping:
            with self._news, self._noting_meetings():
                self.meetings.leave(worker)
        if self._pushes is not None:
            self._pushes.leave(worker)
