# SPDX-License-Identifier: Apache-2.0
"""`ElasticWorker`: a worker process that trains, and may join, leave or die.

Its code is that of the package: client, communicator, loader, queue, and the way to join. Only
the script, the model and the connections are simulated.
"""

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tests.chaos.simulation.elastic.channel import ElasticLane, SimulatedChannel
from tests.chaos.simulation.elastic.host import ElasticHost
from tests.chaos.simulation.elastic.oracle import ElasticOracle, Record, TrackedPush
from tests.chaos.simulation.elastic.script import ElasticScript
from tests.chaos.simulation.lane import Words
from tests.chaos.simulation.oracle import broken
from tests.chaos.simulation.world import World
from torch.utils.data import DataLoader

from fleetlight.data.loader import ShardLoader
from fleetlight.data.observer import NoObserver
from fleetlight.data.queue.client import QueueOptions
from fleetlight.errors import FleetError
from fleetlight.fleet.protocols import NoReplay
from fleetlight.fleet.served.joining_job import JobEnded, JoiningReplay
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.served.shard_queue import ShardQueueClient
from fleetlight.fleet.served.stop_agreement import WorkerLeaves
from fleetlight.kernels import Deduped
from fleetlight.ps import messages as m
from fleetlight.ps.update import TableGradients, Update
from fleetlight.ps.worker.client import Client
from fleetlight.ps.worker.communicator import open_communicator
from fleetlight.ps.worker.connections import CONTROL, HEARTBEAT
from fleetlight.ps.worker.joining import KnownBarriers, RunningJob
from fleetlight.ps.worker.local_parameters import LocalParameters
from fleetlight.ps.worker.replay.step_journal import NoJournal
from fleetlight.ps.worker.reply_values import Wanted
from fleetlight.ps.worker.served_group import ServedGroup
from fleetlight.roles.role import Role

#: the lane of the request for a place, and how often a worker sends a heartbeat
_PLACE, _BEAT_S = "place", 5.0


class _Departure:
    """SIGTERM."""

    seen = False

    def leave_if_asked(self) -> None:
        if self.seen:
            raise WorkerLeaves


@dataclasses.dataclass
class _JobOfWorker:
    """What the package reads of a job."""

    role: Role
    replay: Any
    departure: _Departure
    loaders: list[Any] = dataclasses.field(default_factory=list)
    models: Sequence[Any] = ()
    step: int = 0

    def open(self) -> None:
        """It is open."""


class _Observer(NoObserver):
    """As `JobObserver`, for a script without a model."""

    def __init__(self, job: _JobOfWorker, takes_part: Callable[[], None]) -> None:
        self._job, self._takes_part = job, takes_part

    def epoch_asked(self) -> None:
        self._job.replay.epoch_asked(0)

    def start_iteration(self) -> None:
        self._job.replay.loop_begins(0)
        self._takes_part()

    def between_batches(self) -> None:
        self._job.departure.leave_if_asked()


class ElasticWorker:
    """One process, from its start to its end."""

    is_asleep = False

    def __init__(
        self,
        world: World,
        index: int | None,
        started_at: int,
        script: ElasticScript,
        oracle: ElasticOracle,
        hosts: Sequence[ElasticHost],
    ) -> None:
        """`index`: None for a worker that joins."""
        self.world, self.script, self.oracle = world, script, oracle
        self.index, self.joins = -1 if index is None else index, index is None
        self.started_at = started_at
        self.departure = _Departure()
        #: the process has ended; it trained to its end; it was killed or failed
        self.is_gone = self.has_finished = self.has_died = False
        #: an error has left its loop
        self.has_failed = False
        #: connections were lost: servers may have given it up
        self.was_cut = False
        #: it has given its records back, and says goodbye
        self._leaves = self._says_goodbye = False
        #: the first epoch that it trains in; None before it takes part
        self.first_epoch: int | None = None if self.joins else 0
        self.failure = ""
        self._first_phase = 0
        self._ended_phase = -1
        self._hosts = hosts
        self._cut_until = [0.0 for _ in hosts]
        self._lanes: dict[tuple[str, int], ElasticLane] = {}
        self._channels: dict[ElasticLane, SimulatedChannel] = {}
        self._has_joined = False
        self._client: Client | None = None
        #: pushes that are not known to be acknowledged, and the last ones that are
        self._open: list[TrackedPush] = []
        self._known: list[int] = []
        #: by turn: the ranges by number, the epoch
        self._ranges: dict[int, dict[int, tuple[int, int]]] = {}
        self._epochs: dict[int, int] = {}
        oracle.processes.append(self)

    def __str__(self) -> str:
        place = "?" if self.index < 0 else self.index
        return f"worker {place} (process {self.started_at})"

    def __repr__(self) -> str:
        return str(self)

    # -- facts for the oracle

    @property
    def must_be_counted(self) -> bool:
        """True while it takes part, and no server has a reason to give it up."""
        gone = self.is_gone or self._leaves or self.was_cut
        return self.first_epoch is not None and not gone

    @property
    def may_repeat(self) -> bool:
        """True if others may train records again that it has trained."""
        return self.has_died

    def must_step_in(self, phase: int) -> bool:
        """True if others wait for its steps of this phase."""
        return self.must_be_counted and self._first_phase <= phase > self._ended_phase

    # -- events

    def start(self) -> None:
        """The process starts."""
        if not self.joins:
            self.oracle.takes_part(self)
        self.world.tell(str(self), "starts")
        self.world.spawn(self, str(self), self._run)

    def asked_to_leave(self) -> None:
        """SIGTERM arrives; only workers other than 0 leave at it."""
        if self.index > 0 and not self.is_gone:
            self.world.tell(str(self), "gets SIGTERM")
            self.departure.seen = True

    def dies(self) -> None:
        """The process is killed."""
        # a job needs worker 0, and all workers of its start once
        is_new = not (self._has_joined or self.joins)
        if self.index != 0 and not self.is_gone and not is_new:
            self.world.tell(str(self), "dies")
            self._end(died=True)
            self.world.kill(self)

    def breaks(self) -> None:
        """The network loses a connection."""
        if self._lanes and not self.is_gone:
            self.was_cut |= self.index != 0
            self._lanes[self.world.chance.choice(sorted(self._lanes))].breaks()

    def cut(self, server: int, seconds: float) -> None:
        """It reaches a server no more for a while."""
        if self.is_gone:
            return
        self.was_cut |= self.index != 0
        self.world.tell(str(self), f"is cut off from server {server} for {seconds:.0f} s")
        self._cut_until[server] = self.world.now + seconds
        for lane in self._lanes.values():
            if lane.host.index == server:
                lane.breaks()

    def is_cut(self, host: ElasticHost) -> bool:
        """True while no connection to this server can be made."""
        return self.world.now < self._cut_until[host.index]

    def moment(self) -> None:
        """Its own threads are not interrupted."""

    # -- connections

    def hello(self, lane: ElasticLane) -> m.Message:
        """The first request on a connection."""
        if lane.name == _PLACE:
            return m.PlaceRequest("", str(torch.__version__), self.started_at)
        acknowledged = 0
        if self.script.log and self._client is not None:
            acknowledged = self._client.acknowledged[lane.host.index]
        return m.Greeting(
            "",
            self.index,
            self.script.workers,
            lane.host.index,
            self.script.servers,
            self.started_at,
            lane.name,
            self._has_joined,
            1,
            0.0 if self.joins else self.script.away_s[self.index],
            acknowledged,
            self.joins,
            self.script.places,
        )

    def answered(self, lane: ElasticLane, reply: Words) -> None:
        """A lane has a reply."""
        if lane.name != HEARTBEAT:
            self._channels[lane].answered(reply)

    def _connect(self, name: str) -> list[SimulatedChannel]:
        lanes = [ElasticLane(self, name, host) for host in self._hosts]  # type: ignore[arg-type]
        for lane in lanes:
            self._lanes[name, lane.host.index] = lane
            self._channels[lane] = SimulatedChannel(lane)
        if name == HEARTBEAT:
            self.world.later(self._beat)
        return [self._channels[lane] for lane in lanes]

    def _beat(self) -> None:
        if self.is_gone:
            return
        for server in range(self.script.servers):
            lane = self._lanes[HEARTBEAT, server]
            if not lane.is_busy:
                lane.ask((m.Heartbeat(0), []))
        self.world.at(self.world.now + _BEAT_S, self._beat)

    def _end(self, *, died: bool) -> None:
        self.is_gone, self.has_died = True, died
        for lane in self._lanes.values():
            lane.close()

    # -- the process

    def _run(self) -> None:
        try:
            self._live()
        except FleetError as error:
            self.failure = f"{type(error).__name__}: {error}"
            self.world.tell(str(self), f"fails: {self.failure}")
            if not self.was_cut and not self._is_late():
                raise broken("cause", f"{self} fails: {self.failure}") from error
            self._end(died=not self._says_goodbye)

    def _is_late(self) -> bool:
        """True for a worker that has come, or repeats its goodbye, after the end of a server.

        Also for one that has found no place.
        """
        has_ended = any(host.is_over for host in self._hosts) or "has ended" in self.failure
        is_full = any(text in self.failure for text in ("places of the job", "by another worker"))
        takes_part = self.first_epoch is not None and not self._says_goodbye
        return not takes_part and (has_ended or is_full)

    def _live(self) -> None:
        script = self.script
        if self.joins and not self._get_place():
            return
        client = self._client = Client(
            self.index,
            script.workers,
            script.servers,
            self._connect,
            NoJournal(self.started_at),
            worker_max=script.places,
        )
        group = ServedGroup(client, 1e6)
        session = ServerSession(client, None)
        role = Role(index=None if self.joins else self.index, worker_num=script.places)
        job = _JobOfWorker(role, JoiningReplay() if self.joins else NoReplay(), self.departure)
        try:
            if self.joins:
                group.prelude = _prelude(client)
            self._train(client, group, session, job)
        except JobEnded:
            self.world.tell(str(self), "finds that the job has ended")
        except WorkerLeaves:
            self.world.tell(str(self), "leaves")
        else:
            self.has_finished = True
        self._leaves = True
        for loader in job.loaders:
            loader.source.give_back()
        session.is_over = True
        if session.is_open:
            session.communicator.stop()
        self._acknowledge()
        self._says_goodbye = True
        client.leave()
        self._end(died=False)

    def _get_place(self) -> bool:
        lane = ElasticLane(self, _PLACE, self._hosts[0])  # type: ignore[arg-type]
        self._lanes[_PLACE, 0] = lane
        self._channels[lane] = channel = SimulatedChannel(lane)
        channel.send(m.PlaceRequest("", str(torch.__version__), self.started_at))
        place = channel.receive().message
        assert isinstance(place, m.FreePlace)
        del self._lanes[_PLACE, 0]
        lane.close()
        self.index = place.worker
        self.world.tell(str(self), "has a place")
        return True

    def _train(
        self, client: Client, group: ServedGroup, session: ServerSession, job: _JobOfWorker
    ) -> None:
        """The script of the user."""
        script = self.script
        plan = self._hosts[0].plan
        client.join(plan)
        self._has_joined = True
        group.barrier("init_worker")
        session._bound = types.SimpleNamespace(plan=plan, dense=[])  # type: ignore[assignment]
        session._local_parameters = live = LocalParameters([])
        session._communicator = open_communicator(client, live)
        session.communicator.start()
        if self.joins:
            job.replay.attach(job, session, group)
        for _ in range(script.first_barriers):
            self._rest(session, group, job)
        loader = self._loader(job, session)
        job.loaders.append(loader)
        for epoch in range(loader.epoch, script.epochs):
            for batch in loader:
                try:
                    self._step(session, job, loader, batch)
                except BaseException:
                    self.has_failed = True
                    raise
            if script.gathers:
                told = group.gather_bytes(np.array([self.started_at], np.int64).tobytes(), "gather")
                members = [int(np.frombuffer(one, np.int64)[0]) for one in told]
                self.oracle.met(self, epoch, client.replies.meetings, members)
            if script.rests:
                self._rest(session, group, job)

    def _loader(self, job: _JobOfWorker, session: ServerSession) -> ShardLoader[Any]:
        script = self.script
        queue: Any = ShardQueueClient(job, session, 0)  # type: ignore[arg-type]
        queue._ask, settle = self._watched(queue._ask), queue.settle

        def watched_settle() -> None:
            # it may make more steps of the phase, but others do not wait for them
            self._ended_phase = session.communicator.phase
            settle()

        queue.settle = watched_settle
        return ShardLoader(
            DataLoader(range(script.records), batch_size=script.batch),  # type: ignore[arg-type]
            worker=self.index,
            workers=script.workers,
            seed=0,
            tail="join",
            observer=_Observer(job, lambda: self._takes_part(job, session)),
            queue=QueueOptions(queue, script.range_batches),
        )

    def _takes_part(self, job: _JobOfWorker, session: ServerSession) -> None:
        if self.first_epoch is None:
            self.first_epoch = job.loaders[0].cursor.epoch
            self._first_phase = session.communicator.phase

    def _rest(self, session: ServerSession, group: ServedGroup, job: _JobOfWorker) -> None:
        """`fleet.barrier_worker()`."""
        if not job.replay.is_catching_up:
            self._ended_phase = session.communicator.phase
            session.barrier(types.SimpleNamespace(group=group))  # type: ignore[arg-type]
            self._acknowledge()
            return
        # as `JoiningJob.barrier`
        group.barrier("barrier_worker")
        if not session.bound.plan.steps_together:
            group.barrier("barrier_worker")

    def _watched(self, ask: Callable[[m.Message], m.Message]) -> Callable[[m.Message], m.Message]:
        """Note ranges, and what is reported of them."""

        def watched(message: m.Message) -> m.Message:
            reply = ask(message)
            if isinstance(message, (m.LeaseRequest, m.LeaseProgress)):
                self._report(message.turn, *message.reached)
            if isinstance(message, m.LeaseRequest) and isinstance(reply, m.LeaseReply):
                self._epochs[message.turn] = message.epoch
                if reply.start < reply.stop:
                    ranges = self._ranges.setdefault(message.turn, {})
                    ranges[message.number] = reply.start, reply.stop
            return reply

        return watched

    def _report(self, turn: int, number: int, at: int) -> None:
        epoch = self._epochs.get(turn, 0)
        for one, (start, stop) in self._ranges.get(turn, {}).items():
            end = stop if one < number else min(stop, at) if one == number else start
            self.oracle.reports(self, ((epoch, record) for record in range(start, end)))

    # -- a step

    _phase = 0
    _order = 0

    def _step(
        self, session: ServerSession, job: _JobOfWorker, loader: ShardLoader[Any], batch: Any
    ) -> None:
        communicator, servers = session.communicator, self.script.servers
        epoch, turn = loader.cursor.epoch, loader.source.position["turn"]
        if communicator.phase != self._phase:
            self._phase, self._order = communicator.phase, 0
        self.world.sleep(self.world.chance.random() * self.script.batch_s)
        self._read(session)
        records: list[Record] = [(epoch, record) for record in batch.tolist()]
        push = self.oracle.pushes_now(self, records, turn, communicator.phase, self._order)
        self.world.tell(str(self), f"trains {records} in turn {turn}, {push}")
        self._order += 1
        self._open.append(push)
        ids = np.array([push.number * servers + server for server in range(servers)], np.int64)
        rows = TableGradients(ids, np.arange(servers + 1), np.ones((servers, 1), np.float32))
        communicator.step(Update(0, job.step, [{}], {0: rows}, {}))
        job.step += 1
        # in async mode the last push is in flight
        self._acknowledge(keep=0 if session.bound.plan.steps_together else 1)

    def _acknowledge(self, keep: int = 0) -> None:
        while len(self._open) > keep:
            push = self._open.pop(0)
            push.is_acknowledged = True
            self._known.append(push.number)

    def _read(self, session: ServerSession) -> None:
        """Read rows of an acknowledged push."""
        servers = self.script.servers
        number = self.world.chance.choice(self._known) if self._known else 0
        ids = np.array([number * servers + server for server in range(servers)], np.int64)
        starts = np.arange(servers + 1)
        wanted = Wanted(0, Deduped(ids, starts[:-1].astype(np.int32), starts), insert=False)
        [rows] = session.communicator.pull_now([wanted]).rows
        if number and abs(rows - 1).max() > 1e-3:
            raise broken("once", f"{self} read {rows.ravel().tolist()} for push {number}")


__all__ = ["CONTROL", "ElasticWorker"]


def _prelude(client: Client) -> KnownBarriers:
    """The barriers that a worker which joins has missed."""
    known = RunningJob(client).known_barriers()
    if known is None:
        raise JobEnded
    return known
