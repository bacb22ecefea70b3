# SPDX-License-Identifier: Apache-2.0
"""`Server`: handles the messages of workers with its tables and dense parameters.

Each connection has a thread that calls the server. Workers can
connect and use barriers before `open` gives the server its plan.
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
from fleetlight.ps.message_base import operation_of
from fleetlight.ps.plan import Plan, first_difference
from fleetlight.ps.resume import FINISHED, KEPT, REFUSED, check_beginning
from fleetlight.ps.server.checkpoints.checkpoint_handler import CheckpointHandler
from fleetlight.ps.server.checkpoints.publications import PublicationHandler
from fleetlight.ps.server.durability.durability import Durability, Durable
from fleetlight.ps.server.durability.persistent_state import PersistentState
from fleetlight.ps.server.membership import WorkerMembership
from fleetlight.ps.server.pulls import pulled
from fleetlight.ps.server.running_joins import RunningJoins
from fleetlight.ps.server.shared_exclusive_lock import SharedExclusiveLock
from fleetlight.ps.server.steps.prefetched_ids import PrefetchedBatch
from fleetlight.ps.server.steps.pushes import PushHandler
from fleetlight.ps.server.steps.request_dedup import Reply
from fleetlight.ps.server.workers.presence import PresenceMonitor, ResumeReports
from fleetlight.ps.server.workers.roster import Peer, Roster
from fleetlight.ps.server.write_ahead_log import WriteAheadLog
from fleetlight.ps.tables.server_state import ServerState
from fleetlight.ps.transport.interface import Connection
from fleetlight.ps.wire_forms import Output

Array = NDArray[Any]
Arrays = Sequence[Array]
#: reads the records of a checkpoint
Loaded = Callable[[], Iterable[tuple[m.Message, Arrays]]]
#: replies to these messages report no change that a restart could lose; the other replies wait
#: until the log is on disk
_UNSETTLED = (
    m.Heartbeat,
    m.MetricsRequest,
    m.Resume,
    m.Join,
    m.Leave,
    m.GoodbyeAck,
    m.SnapshotRequest,
    m.WriteFile,
    m.ReadFile,
    m.DropSnapshot,
)
#: how long a join waits for the checkpoint to load before the worker must ask again
_LOADING_S = 1.0


@dataclasses.dataclass(frozen=True)
class _Service:
    """What an open server works with."""

    plan: Plan
    state: ServerState
    pushes: PushHandler
    checkpoints: CheckpointHandler
    publications: PublicationHandler

    def load(self, message: m.Message, arrays: Arrays) -> None:
        """Load a record of a checkpoint, before the first worker joins."""
        if isinstance(message, m.Load):
            self.checkpoints.load(message)
        elif isinstance(message, m.RestoreDense):
            self.checkpoints.restore(message, arrays)
        else:
            assert isinstance(message, m.Fill), message
            self.state.fill(message, arrays)


class Server:
    """Server `index` of `server_num`, for `worker_num` workers.

    The transport calls it for each message: `server(connection, message, arrays)`.
    """

    def __init__(
        self,
        index: int,
        server_num: int,
        worker_num: int,
        *,
        version: str,
        deadline_s: float,
        worker_max: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`worker_max`: how many workers the job may have while it runs."""
        self.index = index
        self._server_num = server_num
        self._durability: Durability | None = None
        #: the incarnation that `Welcome` reports; valid even after `_durability` is closed
        self._incarnation = 0
        self._log = WriteAheadLog()
        self._worker_num, self._places = worker_num, worker_max or worker_num
        self._roster = Roster(index, server_num, worker_num, version, worker_max)
        self._presence = PresenceMonitor(self._roster, self._places, deadline_s, clock)
        self._changed = self._presence.changed
        self._membership = WorkerMembership(self._presence, self._log, worker_num, worker_max)
        #: workers that join while the job runs
        self.joins = RunningJoins(self._presence, self._membership, version, holds_turns=index == 0)
        self._values_lock = SharedExclusiveLock(deadline_s)
        #: the reports from which a restarted job decides how it resumes
        self.resuming = ResumeReports(self._presence, worker_num)
        self._service: _Service | None = None
        #: True while the server has a plan and loads a checkpoint
        self._is_loading = False

    def open(
        self,
        plan: Plan,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[Tensor],
        loaded: Loaded | None = None,
        durable: Durable | None = None,
    ) -> None:
        """Make the tables and dense blocks, and load the checkpoint; then workers may join.

        If the server recovers its own values, it does not load the checkpoint.
        """
        folder = None if durable is None else durable.path
        state = ServerState(plan, self.index, optimizers, parameters, folder)
        deadline_s = self._presence.deadline_s
        pushes = PushHandler(
            state,
            self._presence,
            self._values_lock,
            self._log,
            self._worker_num,
            places=self._places,
        )
        self._membership.shard_queue.queue.cuts_for_waiting = plan.steps_together
        checkpoints = CheckpointHandler(self.index, state, pushes, self._values_lock, deadline_s)
        publications = PublicationHandler(self.index, state, self._values_lock, deadline_s)
        service = _Service(plan, state, pushes, checkpoints, publications)
        durable = self._with_decision(durable)
        self._is_loading = True
        is_loaded = loaded is not None
        durability = None if durable is None else self._opened(durable, plan, is_loaded)
        if loaded is not None and (durability is None or durability.is_new):
            self._load(service, loaded, durability)
        if durability is not None:
            durability.begin(self._persistent_state(service), self._log)
            self._durability = durability
            if durable is not None and durable.decision is not None:
                check_beginning(durable.decision, pushes.progress.versions.version)
        self._membership.begin(pushes, tolerates_loss=plan.lost_worker == "go_on")
        with self._changed:
            self._incarnation = 1 if durability is None else durability.incarnation
            self._service = service
            if durable is not None:
                resumes = durable.decision is not None
                self._presence.expect(durable.away_s, stays=resumes)
            self._changed.notify_all()

    def _with_decision(self, durable: Durable | None) -> Durable | None:
        """Add the decision of all processes if the whole job resumes."""
        remains = self.resuming.remains
        if durable is None or remains is None:
            return durable
        decision = self.resuming.decided()
        if decision.kind == REFUSED:
            raise JournalError(f"durability: {decision.why}")
        if decision.kind == FINISHED and remains.state != KEPT:
            # this server received all goodbyes, and the workers repeat them
            return None
        return dataclasses.replace(durable, decision=decision, must_exist=False)

    def _opened(self, durable: Durable, plan: Plan, loading: bool) -> Durability:
        identity = FolderIdentity(
            self.index, self._server_num, durable.job, plan, durable.start, loading=loading
        )
        return Durability(durable, identity)

    def _load(self, service: _Service, loaded: Loaded, durability: Durability | None) -> None:
        try:
            for message, arrays in loaded():
                service.load(message, arrays)
        except BaseException:
            if durability is not None:
                # training has not started, so a restart has nothing to recover
                durability.close(is_needed=False)
            raise

    def _persistent_state(self, service: _Service) -> PersistentState:
        return PersistentState(
            service.state,
            service.pushes,
            service.checkpoints,
            self._membership.barriers,
            self._membership.shard_queue.queue,
            self._presence,
            self._values_lock,
            self._log,
        )

    def __call__(self, connection: Connection, message: m.Message, arrays: Arrays) -> Reply:
        """Handle a message and return the reply; the worker receives what it raises."""
        if isinstance(message, m.Greeting):
            return self._greet(connection, message)
        if isinstance(message, m.PlaceRequest):
            self._check_ready()
            return self.joins.place(message)
        peer = connection.note
        if not isinstance(peer, Peer):
            raise ProtocolError(
                f"{connection.peer} sent {type(message).__name__} first, expected Greeting"
            )
        self._roster.check_process(peer)
        with self._presence.during(peer.worker, _operation(message)):
            self._membership.mark_present(peer)
            reply = self._handle(peer, message, arrays, connection.output)
            if self._durability is not None and self._replaces(message):
                self._durability.snapshot_now()
            elif not isinstance(message, _UNSETTLED):
                # a restart must not lose what the reply confirms or shows
                self._log.wait_on_disk()
            return reply

    def _replaces(self, message: m.Message) -> bool:
        """True if the message replaced values without a record in the log."""
        if isinstance(message, m.Load):
            return not message.dry
        # worker 0 sends initial values once, and a log of values contains them
        brings = isinstance(message, m.Fill) and not self._log.logs_values
        return brings or isinstance(message, m.RestoreDense)

    def gone(self, connection: Connection, error: PeerError | None) -> None:
        """A connection has ended."""
        self._membership.gone(connection, error)

    def wait(self) -> None:
        """Wait until every worker has left; raise if a worker failed or was lost."""
        self._membership.until_all_left()

    def refuse(self, why: str = "") -> None:
        """Refuse all requests: workers that wait or call receive the reason."""
        self._presence.close(f"server {self.index} has closed" + (f": {why}" if why else ""))

    def close(self, why: str = "") -> None:
        """Refuse all requests and close the log; delete the folder if the job is over."""
        self.refuse(why)
        if self._service is not None:
            self._service.checkpoints.drop()
        if self._durability is not None:
            ended = self.is_over and not self.stopped
            self._durability.close(is_needed=not self.is_over, ended=ended)
            self._durability = None

    def call_stop(self) -> None:
        """Ask all workers to stop; signal handlers may call it."""
        self._presence.call_stop()

    @property
    def is_open(self) -> bool:
        """True once the server has a plan and its values."""
        return self._service is not None

    @property
    def is_over(self) -> bool:
        """True once every worker has left without a failure."""
        return self._roster.is_over

    @property
    def stopped(self) -> bool:
        """True once a worker has left because the job was asked to stop."""
        return self._membership.stopped

    @property
    def closed(self) -> bool:
        """True once the server refuses all requests."""
        return self._presence.closed

    def metrics(self) -> m.ServerMetrics:
        """Counts of pushes and rows, and bytes of each table."""
        service = self._service
        if service is None:
            return m.ServerMetrics(0, {}, {}, {})
        tables, durability = service.state.tables, self._durability
        versions = service.pushes.progress.versions
        with self._changed:
            pushes, staleness = versions.version, dict(versions.staleness)
        rows = {table.plan.name: len(table) for table in tables}
        nbytes = {table.plan.name: table.nbytes for table in tables}
        durable = {} if durability is None else durability.metrics()
        return m.ServerMetrics(pushes, rows, nbytes, staleness, durable)

    def _handle(self, peer: Peer, message: m.Message, arrays: Arrays, output: Output) -> Reply:
        match message:
            case m.Barrier():
                return self._membership.barrier(peer, message, arrays)
            case m.Heartbeat():
                return self._membership.heartbeat(peer, message)
            case m.Leave():
                return self._membership.leave(peer, message)
            case m.GoodbyeAck():
                return self._membership.confirm(peer)
            case m.LeaseRequest():
                return self._membership.lease(peer, message)
            case m.LeaseProgress():
                return self._membership.shard_queue.progress(peer, message)
            case m.RemainingRequest():
                return self._membership.shard_queue.remaining(message)
            case m.MetricsRequest():
                return self.metrics(), []
            case m.Resume():
                return self._resume(peer, message)
            case m.Join():
                return self._join(peer, message)
            case m.PreludeRequest() | m.Admit() | m.OfferState() | m.Enter() | m.EnteredAll():
                return self.joins.handle(peer, message, arrays)
            case _:
                return self._train(peer, message, arrays, output)

    def _train(self, peer: Peer, message: m.Message, arrays: Arrays, output: Output) -> Reply:
        """Handle a message that needs the tables and dense parameters."""
        match message:
            case m.Pull():
                return self._pull(peer, message, arrays, output)
            case m.Push():
                return self._serving().pushes.push(peer, message, arrays, output)
            case m.Apply():
                return self._serving().pushes.apply(peer, message, arrays, output)
            case m.GeoExchange():
                return self._serving().pushes.exchange(peer, message, arrays, output)
            case m.EndPhase():
                return self._end_phase(peer, message)
            case m.Fill():
                return self._fill(peer, message, arrays)
            case m.Shrink():
                return self._shrink(message)
            case _:
                return self._checkpoint(peer, message, arrays)

    def _checkpoint(self, peer: Peer, message: m.Message, arrays: Arrays) -> Reply:
        match message:
            case m.SnapshotRequest():
                return self._serving().checkpoints.cut(message)
            case m.Save():
                return self._serving().checkpoints.save(message)
            case m.ReadFile():
                return self._serving().checkpoints.read_file(message)
            case m.WriteFile():
                return self._serving().checkpoints.write_file(message, arrays)
            case m.DropSnapshot():
                return self._serving().checkpoints.drop()
            case m.FetchDense():
                return self._serving().checkpoints.fetch()
            case m.Load():
                return self._serving().checkpoints.load(message)
            case m.RestoreDense():
                return self._serving().checkpoints.restore(message, arrays)
            case m.PublicationRequest():
                return self._serving().publications.changed(message)
            case m.PublicationCut():
                return self._serving().publications.cut(message)
            case m.PublicationWrite():
                return self._serving().publications.write(message)
            case _:
                raise ProtocolError(
                    f"{peer} sent {type(message).__name__}, which servers only send"
                )

    def _serving(self) -> _Service:
        """The service of an open server; an error before `open` and after the job."""
        self._presence.check()
        return self._open_service()

    def _open_service(self) -> _Service:
        if self._service is None:
            raise PlanError(f"server {self.index} has no plan yet; send Join before other requests")
        return self._service

    def _check_ready(self) -> None:
        """Let a worker that joins try again: a server that recovers does not know who is here."""
        if not self.is_open:
            raise PeerLostError(f"server {self.index} is not ready for workers that join")

    def _greet(self, connection: Connection, message: m.Greeting) -> Reply:
        if message.joins:
            self._check_ready()
        try:
            is_new = self._admitted(connection, message)
        finally:
            # also what an earlier greeting is about to write, or the loss that this one is told of
            self._log.wait_on_disk()
        if is_new and message.worker == 0 and self._service is not None:
            # worker 0 restarted: it repeats a save that was in progress, or drops it
            self._service.checkpoints.drop()
        with self._presence.during(message.worker, "greeting"):
            return self._welcome()

    def _admitted(self, connection: Connection, message: m.Greeting) -> bool:
        """True for a worker whose incarnation is new; an error for one that does not belong."""
        with self._changed:
            if message.joined and not self.is_open:
                # the worker tries again
                raise PeerLostError(
                    f"server {self.index} has restarted and is recovering its values"
                )
            if self._service is not None:
                self._service.pushes.check_has(
                    message.worker, message.started_at, message.acknowledged
                )
            return self._membership.greet(connection, message)

    def _welcome(self) -> Reply:
        epoch = 0 if self._service is None else self._service.pushes.progress.marks.epoch
        return m.Welcome(self.index, epoch, self._incarnation, self.resuming.remains), []

    def _resume(self, peer: Peer, message: m.Resume) -> Reply:
        decision = self.resuming.report(peer.worker, message.report)
        if not decision.keeps_workers or not message.waits:
            return m.Resumed(decision), []
        with self._changed:
            self._presence.check()
            if not self._changed.wait_for(lambda: self.is_open, _LOADING_S):
                return m.Done(), []
            pushed = self._open_service().pushes.last_push(peer.worker, peer.started_at)
            return m.Resumed(decision, *pushed, self._roster.is_lost(peer.worker)), []

    def _join(self, peer: Peer, message: m.Join) -> Reply:
        with self._changed:
            self._presence.check()
            self._presence.wait(
                "joining",
                lambda: self.is_open or self._is_loading,
                list,
                otherwise=f"server {self.index}, which has not called fleet.init_server() yet",
            )
            if not self._changed.wait_for(lambda: self.is_open, _LOADING_S):
                # the worker asks again: a large checkpoint may take longer than a deadline
                return m.Done(), []
        difference = first_difference(self._open_service().plan, message.plan)
        if difference is not None:
            raise PlanError(
                f"server {self.index} (here) and {peer} (there) have different plans: "
                f"{difference}; run the same script with the same settings everywhere"
            )
        return self._welcome()

    def _pull(self, peer: Peer, message: m.Pull, arrays: Arrays, output: Output) -> Reply:
        service = self._serving()
        ids = service.state.pulled_ids(message, arrays, str(peer))
        if message.ahead:
            for wanted, its in zip(message.tables, ids, strict=True):
                service.pushes.remember(peer, PrefetchedBatch(wanted.table, message.batch, its))
        steps = service.pushes.wait_for_steps(message.phase, message.at_least)
        return m.Pulled(*steps), pulled(service.state, self._log, message, ids, output)

    def _end_phase(self, peer: Peer, message: m.EndPhase) -> Reply:
        self._serving().pushes.end(peer.worker, message.phase)
        return m.Done(), []

    def _fill(self, peer: Peer, message: m.Fill, arrays: Arrays) -> Reply:
        if peer.worker != 0:
            raise ProtocolError(f"{peer} sent initial values, which only worker 0 sends")
        state = self._serving().state
        with self._values_lock.shared():
            if state.wants(message):
                self._log.apply(message, arrays, lambda: state.fill(message, arrays))
        return m.Done(), []

    def _shrink(self, message: m.Shrink) -> Reply:
        state = self._serving().state
        with self._values_lock.shared():
            removed, left = self._log.apply(message, [], lambda: state.shrink(message))
        return m.Shrunk(removed, left), []


def _operation(message: m.Message) -> str:
    """What a worker is doing, for error texts."""
    if isinstance(message, m.Barrier):
        return message.operation
    if isinstance(message, (m.Push, m.Apply)):
        return f"step {message.step} of optimizer {message.optimizer}"
    return operation_of(message)
