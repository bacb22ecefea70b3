# SPDX-License-Identifier: Apache-2.0
"""`Server`: answers the workers' messages out of its tables and dense parameters.

Each connection has a thread that calls the server. It is there before it knows what is trained: the
workers can meet from then on, and `open` gives it the plan.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetlight.errors import (
    JournalError,
    PeerError,
    PeerLostError,
    PlanError,
    ProtocolError,
)
from fleetlight.ps import messages as m
from fleetlight.ps.journal.folder import FolderIdentity
from fleetlight.ps.messages.base import operation_of
from fleetlight.ps.plan import Plan, first_difference
from fleetlight.ps.resume import FINISHED, KEPT, REFUSED, check_beginning
from fleetlight.ps.server.ahead_lists import AheadList
from fleetlight.ps.server.attendance import Attendance
from fleetlight.ps.server.chronicle import Chronicle
from fleetlight.ps.server.company import Company
from fleetlight.ps.server.durability import Durability, Durable
from fleetlight.ps.server.gate import Gate
from fleetlight.ps.server.keeping import Keeping
from fleetlight.ps.server.kept import Kept
from fleetlight.ps.server.ledger import Peer
from fleetlight.ps.server.pushes import Pushes
from fleetlight.ps.server.reading import pulled
from fleetlight.ps.server.resuming import Resuming
from fleetlight.ps.server.roster import Roster
from fleetlight.ps.server.tickets import Reply
from fleetlight.ps.tables.holdings import Holdings
from fleetlight.ps.transport.interface import Connection

Array = NDArray[Any]
Arrays = Sequence[Array]
#: reads a checkpoint
Loaded = Callable[[], Iterable[tuple[m.Message, Arrays]]]
#: their answers tell nothing that could be lost later, or it was written down before; all others
#: wait for the journal
_UNSETTLED = (
    m.Heartbeat,
    m.FiguresRequest,
    m.Resume,
    m.Join,
    m.Leave,
    m.GoodbyeAck,
    m.SnapshotRequest,
    m.WriteFile,
    m.ReadFile,
    m.DropSnapshot,
)
#: how often a worker that joins is told that a checkpoint is still being read
_LOADING_S = 1.0


@dataclasses.dataclass(frozen=True)
class _Service:
    """What an open server works with."""

    plan: Plan
    holdings: Holdings
    pushes: Pushes
    keeping: Keeping

    def take(self, message: m.Message, arrays: Arrays) -> None:
        """Values of a checkpoint, before anybody has joined."""
        if isinstance(message, m.Load):
            self.keeping.load(message)
        elif isinstance(message, m.RestoreDense):
            self.keeping.restore(message, arrays)
        else:
            assert isinstance(message, m.Fill), message
            self.holdings.fill(message, arrays)


class Server:
    """One of `server_num` servers, for `worker_num` workers.

    It is called as a handler of `transport`: `server(connection, message, arrays)`.
    """

    def __init__(
        self,
        index: int,
        server_num: int,
        worker_num: int,
        *,
        version: str,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = index
        self._server_num = server_num
        self._durability: Durability | None = None
        #: as in `Welcome`, also once what is kept was closed
        self._life = 0
        self._chronicle = Chronicle()
        self._worker_num = worker_num
        self._roster = Roster(index, server_num, worker_num, version)
        self._attendance = Attendance(self._roster, worker_num, deadline_s, clock)
        self._news = self._attendance.news
        self._company = Company(self._attendance, self._chronicle, worker_num)
        self._gate = Gate(deadline_s)
        #: how the whole job resumes, where it does
        self.resuming = Resuming(self._attendance, worker_num)
        self._service: _Service | None = None
        #: the plan is known, and a checkpoint is being read
        self._is_loading = False
        self._handlers = self._all_handlers()

    def open(
        self,
        plan: Plan,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[Tensor],
        loaded: Loaded | None = None,
        durable: Durable | None = None,
    ) -> None:
        """Make the tables and dense blocks; workers may join once all that is `loaded` is in.

        What an earlier life of this server has written down counts more: then nothing is loaded.
        """
        holdings = Holdings(plan, self.index, optimizers, parameters)
        deadline_s = self._attendance.deadline_s
        pushes = Pushes(holdings, self._attendance, self._gate, self._chronicle, self._worker_num)
        keeping = Keeping(self.index, holdings, pushes, self._gate, deadline_s)
        service = _Service(plan, holdings, pushes, keeping)
        durable = self._decided(durable)
        self._is_loading = True
        is_loaded = loaded is not None
        durability = None if durable is None else self._opened(durable, plan, is_loaded)
        if loaded is not None and (durability is None or durability.is_new):
            self._take(service, loaded, durability)
        if durability is not None:
            durability.begin(self._kept(service), self._chronicle)
            self._durability = durability
            if durable is not None and durable.decision is not None:
                check_beginning(durable.decision, pushes.ledger.versions.version)
        self._company.begin(pushes, goes_on=plan.lost_worker == "go_on")
        with self._news:
            self._life = 1 if durability is None else durability.life
            self._service = service
            if durable is not None:
                resumes = durable.decision is not None
                self._attendance.expect(durable.away_s, stays=resumes)
            self._news.notify_all()

    def _decided(self, durable: Durable | None) -> Durable | None:
        """With what all processes have agreed on, where the whole job resumes."""
        remains = self.resuming.remains
        if durable is None or remains is None:
            return durable
        decision = self.resuming.decided()
        if decision.kind == REFUSED:
            raise JournalError(f"durability: {decision.why}")
        if decision.kind == FINISHED and remains.state != KEPT:
            # it has heard all goodbyes, and hears them again
            return None
        return dataclasses.replace(durable, decision=decision, must_exist=False)

    def _opened(self, durable: Durable, plan: Plan, loading: bool) -> Durability:
        identity = FolderIdentity(
            self.index, self._server_num, durable.job, plan, durable.start, loading=loading
        )
        return Durability(durable, identity)

    def _take(self, service: _Service, loaded: Loaded, durability: Durability | None) -> None:
        try:
            for message, arrays in loaded():
                service.take(message, arrays)
        except BaseException:
            if durability is not None:
                # nothing has begun that another start would have to be told of
                durability.close(is_needed=False)
            raise

    def _kept(self, service: _Service) -> Kept:
        return Kept(
            service.holdings,
            service.pushes,
            service.keeping,
            self._company.meetings,
            self._company.dealing.work,
            self._attendance,
            self._gate,
            self._chronicle,
        )

    def __call__(self, connection: Connection, message: m.Message, arrays: Arrays) -> Reply:
        """Answer a message; what is raised is meant for the worker."""
        if isinstance(message, m.Greeting):
            return self._hello(connection, message)
        peer = connection.note
        if not isinstance(peer, Peer):
            raise ProtocolError(
                f"{connection.peer} began with {type(message).__name__}, expected Greeting"
            )
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"{peer} sent {type(message).__name__}, which servers only answer")
        self._roster.check_life(peer.worker, peer.life)
        with self._attendance.during(peer.worker, _operation(message)):
            self._company.hear(peer)
            reply = handler(peer, message, arrays)
            if self._durability is not None and self._replaces(message):
                self._durability.snapshot_now()
            elif not isinstance(message, _UNSETTLED):
                # what is acknowledged or was seen is not lost any more
                self._chronicle.settle()
            return reply

    def _replaces(self, message: m.Message) -> bool:
        """Whether other values stand there now, which are written down nowhere."""
        if isinstance(message, m.Load):
            return not message.dry
        # first values are brought once; a log has them
        brings = isinstance(message, m.Fill) and not self._chronicle.keeps_values
        return brings or isinstance(message, m.RestoreDense)

    def gone(self, connection: Connection, error: PeerError | None) -> None:
        """A connection has ended."""
        self._company.gone(connection, error)

    def wait(self) -> None:
        """Until every worker has left; raises when one has failed or was lost."""
        self._company.until_all_left()

    def refuse(self, why: str = "") -> None:
        """Serve no more: whoever waits or calls is told why."""
        self._attendance.close(f"server {self.index} has closed" + (f": {why}" if why else ""))

    def close(self, why: str = "") -> None:
        """The same, and let go of what is kept; once its part is over that is removed."""
        self.refuse(why)
        if self._service is not None:
            self._service.keeping.drop()
        if self._durability is not None:
            ended = self.is_over and not self.stopped
            self._durability.close(is_needed=not self.is_over, ended=ended)
            self._durability = None

    def call_stop(self) -> None:
        """Have all workers told that the job is to stop; safe in a signal's handler."""
        self._attendance.call_stop()

    @property
    def is_open(self) -> bool:
        """True once it knows what is trained."""
        return self._service is not None

    @property
    def is_over(self) -> bool:
        """True once everybody has left, and nobody in anger: it has done its duty."""
        return self._roster.is_over

    @property
    def stopped(self) -> bool:
        """True once a worker has left because the job was asked to stop."""
        return self._company.stopped

    @property
    def closed(self) -> bool:
        """True once it serves no more."""
        return self._attendance.closed

    def counted(self) -> m.ServerFigures:
        """What there is to say in figures."""
        service = self._service
        if service is None:
            return m.ServerFigures(0, {}, {}, {})
        tables = service.holdings.tables
        with self._news:
            versions = service.pushes.ledger.versions
            pushes, staleness = versions.version, dict(versions.staleness)
        return m.ServerFigures(
            pushes,
            {table.plan.name: len(table) for table in tables},
            {table.plan.name: table.nbytes for table in tables},
            staleness,
        )

    def _all_handlers(self) -> dict[type, Callable[[Peer, Any, Arrays], Reply]]:
        """By class of the message. Those that work on the holdings need the plan."""
        dealing = self._company.dealing
        return {
            m.Barrier: self._company.meet,
            m.Heartbeat: lambda peer, message, a: self._company.beat(peer, message),
            m.Leave: lambda peer, message, a: self._company.leave(peer, message),
            m.GoodbyeAck: lambda peer, message, a: self._company.confirm(peer),
            m.FiguresRequest: lambda peer, message, arrays: (self.counted(), []),
            m.LeaseRequest: lambda peer, message, a: dealing.deal(peer, message),
            m.LeaseProgress: lambda peer, message, a: dealing.reach(peer, message),
            m.RemainingRequest: lambda peer, message, a: dealing.remain(message),
            m.Resume: self._resume,
            m.Join: self._join,
            m.Pull: self._pull,
            m.EndPhase: self._end_phase,
            m.Push: lambda p, message, a: self._serving().pushes.push(p, message, a),
            m.Apply: lambda p, message, a: self._serving().pushes.apply(p, message),
            m.GeoExchange: lambda p, message, a: self._serving().pushes.exchange(p, message, a),
            m.Fill: self._fill,
            m.Shrink: self._shrink,
            m.SnapshotRequest: lambda p, message, a: self._serving().keeping.cut(),
            m.Save: lambda p, message, a: self._serving().keeping.save(message),
            m.ReadFile: lambda p, message, a: self._serving().keeping.take(message),
            m.WriteFile: lambda p, message, a: self._serving().keeping.put(message, a),
            m.DropSnapshot: lambda p, message, a: self._serving().keeping.drop(),
            m.FetchDense: lambda p, message, a: self._serving().keeping.fetch(),
            m.Load: lambda p, message, a: self._serving().keeping.load(message),
            m.RestoreDense: lambda p, message, a: self._serving().keeping.restore(message, a),
        }

    def _serving(self) -> _Service:
        """What the server works with; an error where the job is over or has not begun."""
        self._attendance.check()
        return self._open_service()

    def _open_service(self) -> _Service:
        if self._service is None:
            raise PlanError(
                f"server {self.index} does not know yet what is trained; Join comes before it is "
                "asked for anything"
            )
        return self._service

    def _hello(self, connection: Connection, message: m.Greeting) -> Reply:
        with self._news:
            if message.joined and not self.is_open:
                # to be tried again
                raise PeerLostError(f"server {self.index} is not back yet: it takes up its values")
            if self._service is not None:
                self._service.pushes.check_has(
                    message.worker, message.incarnation, message.acknowledged
                )
            is_news = self._company.greet(connection, message)
        if is_news:
            self._chronicle.settle()
            if message.worker == 0 and self._service is not None:
                # what an earlier life was to save, this one saves anew or not at all
                self._service.keeping.drop()
        with self._attendance.during(message.worker, "hello"):
            return self._welcome()

    def _welcome(self) -> Reply:
        epoch = 0 if self._service is None else self._service.pushes.ledger.marks.epoch
        return m.Welcome(self.index, epoch, self._life, self.resuming.remains), []

    def _resume(self, peer: Peer, message: m.Resume, arrays: Arrays) -> Reply:
        decision = self.resuming.report(peer.worker, message.report)
        if not decision.keeps_workers or not message.waits:
            return m.Resumed(decision), []
        with self._news:
            self._attendance.check()
            if not self._news.wait_for(lambda: self.is_open, _LOADING_S):
                return m.Done(), []
            known = self._open_service().pushes.known_of(peer.worker, peer.incarnation)
            return m.Resumed(decision, *known, self._roster.is_lost(peer.worker)), []

    def _join(self, peer: Peer, message: m.Join, arrays: Arrays) -> Reply:
        with self._news:
            self._attendance.check()
            self._attendance.wait(
                "joining",
                lambda: self.is_open or self._is_loading,
                list,
                nobody=f"server {self.index}, which has not called fleet.init_server() yet",
            )
            if not self._news.wait_for(lambda: self.is_open, _LOADING_S):
                # to be asked again: a large checkpoint takes longer than any deadline
                return m.Done(), []
        difference = first_difference(self._open_service().plan, message.plan)
        if difference is not None:
            raise PlanError(
                f"server {self.index} (here) and {peer} (there) do not train the same: "
                f"{difference}; run the same script with the same settings everywhere"
            )
        return self._welcome()

    def _pull(self, peer: Peer, message: m.Pull, arrays: Arrays) -> Reply:
        service = self._serving()
        ids = service.holdings.pulled_ids(message, arrays, str(peer))
        if message.ahead:
            for wanted, its in zip(message.tables, ids, strict=True):
                service.pushes.remember(peer, AheadList(wanted.table, message.batch, its))
        ledger, phase = service.pushes.ledger, message.phase
        with self._news:
            self._attendance.wait(
                f"a pull after {message.at_least} steps of every worker",
                lambda: ledger.clocks.may(phase, message.at_least),
                lambda: ledger.clocks.behind(phase, message.at_least),
            )
            version, slowest = ledger.versions.version, ledger.clocks.slowest(phase)
        return m.Pulled(version, slowest), pulled(service.holdings, self._chronicle, message, ids)

    def _end_phase(self, peer: Peer, message: m.EndPhase, arrays: Arrays) -> Reply:
        self._serving().pushes.end(peer.worker, message.phase)
        return m.Done(), []

    def _fill(self, peer: Peer, message: m.Fill, arrays: Arrays) -> Reply:
        if peer.worker != 0:
            raise ProtocolError(f"{peer} brought first values, expected those of worker 0")
        holdings = self._serving().holdings
        with self._gate.passing():
            if holdings.wants(message):
                self._chronicle.make(message, arrays, lambda: holdings.fill(message, arrays))
        return m.Done(), []

    def _shrink(self, peer: Peer, message: m.Shrink, arrays: Arrays) -> Reply:
        holdings = self._serving().holdings
        with self._gate.passing():
            removed, left = self._chronicle.make(message, [], lambda: holdings.shrink(message))
        return m.Shrunk(removed, left), []


def _operation(message: m.Message) -> str:
    """What a worker is doing, for error texts."""
    if isinstance(message, m.Barrier):
        return message.operation
    if isinstance(message, (m.Push, m.Apply)):
        return f"step {message.step} of optimizer {message.optimizer}"
    return operation_of(message)
