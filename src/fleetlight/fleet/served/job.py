# SPDX-License-Identifier: Apache-2.0
"""`ServedJob`: a worker of a job with parameter servers, or one process with a server inside."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fleetlight.checkpoint import Bases, Checkpoint
from fleetlight.collective.group import Group
from fleetlight.data.queue.client import QueueOptions
from fleetlight.errors import PeerError, PeerLostError, PlanError
from fleetlight.fleet.checkpoints import autosave
from fleetlight.fleet.exit.exit_status import report_left_job, report_saying_goodbye
from fleetlight.fleet.job import IdsOf, Job, PlainLayer, Rows, ShrunkTable
from fleetlight.fleet.parts import summaries
from fleetlight.fleet.parts.publishing import PublishOptions
from fleetlight.fleet.plan.tied_weights import refuse_tied
from fleetlight.fleet.protocols import RowPublisher
from fleetlight.fleet.served.prefetch_hints import IdLookahead
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.served.shard_queue import ShardQueueClient
from fleetlight.fleet.served.steps import ServedPolicy, ServedSteps, served_programs
from fleetlight.fleet.served.stop_agreement import ServedAgreement, WorkerDeparture
from fleetlight.fleet.served.tables.frozen_tables import open_tables
from fleetlight.fleet.served.tables.loading import ServedLoading
from fleetlight.fleet.served.tables.server_checkpoint import ServerCheckpoint
from fleetlight.fleet.served.tables.shrinking import shrink_tables
from fleetlight.fleet.served.tables.values import ServedValues
from fleetlight.fleet.training.model import ManagedModel
from fleetlight.fleet.training.optimizer import ManagedOptimizer
from fleetlight.observe.telemetry.registry import Value
from fleetlight.ps.update import Update
from fleetlight.ps.worker.communicator.base import norm_of
from fleetlight.ps.worker.served_group import ServedGroup


@dataclasses.dataclass(kw_only=True)
class ServedJob(Job):
    """A worker that sends gradients to the servers and receives values."""

    #: the connection to the servers
    session: ServerSession
    #: the optimizers whose steps the servers take part in
    steps: list[ServedSteps] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.closers.callback(self._delete_durable_state)
        self.closers.callback(self._say_goodbye)
        self.closers.callback(self.session.leave)

    def metrics(self) -> dict[str, Value]:
        """The counters of a worker, and of a server in this process."""
        found, session = super().metrics(), self.session
        if session.is_open:
            # the job counts steps, including those before this process was started
            counted = {k: v for k, v in session.communicator.metrics().items() if k != "steps"}
            queued = {"queued_pushes": session.communicator.queued_pushes}
            found = {**found, **counted, **queued, **session.client.traffic()}
            if session.embedded is not None:
                found |= summaries.server_metrics(session.embedded.metrics())
        return found

    def server_clocks(self) -> dict[str, int]:
        if not self.session.is_open:
            return {}
        counted = self.session.client.metrics()
        return {f"server {number}": one.clock_ns for number, one in enumerate(counted)}

    @property
    def _peers(self) -> ServedGroup:
        assert isinstance(self.group, ServedGroup)
        return self.group

    def manage_model(self, module: nn.Module) -> ManagedModel:
        return ManagedModel(module, self, ServedPolicy())

    def manage_optimizer(self, optimizer: torch.optim.Optimizer) -> ManagedOptimizer:
        return ManagedOptimizer(optimizer, self, self._served_steps)

    def _served_steps(self, managed: ManagedOptimizer) -> ServedSteps:
        self.steps.append(self._make_steps(managed))
        return self.steps[-1]

    def _make_steps(self, managed: ManagedOptimizer) -> ServedSteps:
        return ServedSteps(managed, self.session, served_programs)

    def check_model(self, module: nn.Module) -> None:
        refuse_tied(module, served=True)

    def check_not_late(self, call: str) -> None:
        if not self.session.is_open:
            return
        again = (
            ", or, to train another model from here on, call fleet.reset() and then fleet.init()"
            if self.group.alone
            else ""
        )
        raise PlanError(
            f"{call} was called after fleet.init_worker() or the first forward, when the servers "
            f"had made their tables; call it before{again}"
        )

    @property
    def worker_num(self) -> int:
        return self.session.client.active

    @property
    def dense_group(self) -> Group | None:
        """With `dense="allreduce"` and once the job is open: all workers."""
        return self.session.dense_group

    def staleness(self) -> float | None:
        return (
            summaries.mean_staleness(self.session.client.metrics())
            if self.session.is_open
            else None
        )

    def clip(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """In sync mode only the servers have the gradients of all workers."""
        for model in self.models:
            model.freeze()
        owners = self._owners({id(parameter) for parameter in parameters})
        updates = [steps.update() for steps in owners]
        merges = [steps.managed.merge for steps in owners]
        if any(merge is not None and merge.is_between() for merge in merges):
            return torch.tensor(norm_of(updates, norm_type))
        norm = self._clip(updates, max_norm, norm_type)
        for steps in owners:
            steps.norm = norm
        return torch.tensor(norm)

    def _clip(self, updates: list[Update], max_norm: float, norm_type: float) -> float:
        return self.session.clip(updates, max_norm, norm_type)

    def _owners(self, wanted: set[int]) -> list[ServedSteps]:
        """The optimizers that step those parameters; each is clipped as a whole."""
        owners = []
        for steps in self.steps:
            mine = {id(p) for group in steps.optimizer.param_groups for p in group["params"]}
            if mine & wanted:
                owners.append(steps)
            if mine & wanted and mine - wanted:
                raise PlanError(
                    "clip_grad_norm_: got some of the parameters of an optimizer; with parameter "
                    "servers the gradients of an optimizer are clipped together, give all of them"
                )
        return owners

    def open(self) -> None:
        self.session.open(self)

    def run_once(self, call: str, action: Callable[[], Sequence[bytes]]) -> Sequence[bytes]:
        return self.session.client.replies.once(call, action)

    def server_snapshot(
        self, model: nn.Module, via: str, bases: Bases | None = None
    ) -> ServerCheckpoint:
        # the servers write one checkpoint at a time
        self.background_save.finish()
        return ServerCheckpoint(self, self.session, model, via, bases)

    def values_of(self, model: nn.Module) -> ServedValues:
        return ServedValues(self, self.session, model)

    def prepare(self) -> None:
        self.open()
        self.agree_on_models()

    def barrier(self) -> None:
        self.session.barrier(self)

    @contextlib.contextmanager
    def at_rest(self, *, everything: bool = False) -> Iterator[None]:
        """Inside the block nothing of this worker is in flight to the servers.

        Under GeoSGD, and with `everything`, workers and servers have equal values in it.
        """
        self.open()
        for model in self.models:
            model.freeze()
        communicator = self.session.communicator
        forced = everything or self.session.bound.plan.exchanges_differences
        communicator.settle() if forced else communicator.flush()
        try:
            yield
        except PeerError:
            raise
        except Exception:
            if forced:
                communicator.resume()
            raise
        if forced:
            communicator.resume()

    def watch_terminations(self) -> None:
        peers = self._peers
        if self.role.is_elastic and self.role.index:
            departure = self.departure = WorkerDeparture(self)
            self.closers.callback(departure.close)
            peers.check_stays = departure.check_stays
        autosave.watch_in_worker(self, ServedAgreement(self, self.session, peers))
        if self.autosave is not None:
            peers.when_left_alone = self.autosave.peer_missing

    def finish(self) -> None:
        """Send the last pushes; if that fails, the others get the error and no goodbye."""
        try:
            for loader in self.loaders:
                loader.source.give_back()
            self.session.stop()
            if self.publisher is not None:
                self.publisher.stop()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            self.group.fail(text)
            self.session.fail(text)
            raise

    def fail(self, error: str, *, consequence: bool) -> None:
        if self.publisher is not None:
            self.publisher.abandon()
        self.session.fail(error)
        super().fail(error, consequence=consequence)

    def release_layers(self) -> None:
        self.session.release_layers()
        self.steps.clear()

    def prefetch_hints(self, ids_of_batch: IdsOf | None) -> IdLookahead:
        return IdLookahead(self, self.session, ids_of_batch)

    def shard_queue(self, range_batches: int) -> QueueOptions:
        return QueueOptions(ShardQueueClient(self, self.session, len(self.loaders)), range_batches)

    def agree_on_batches(self, samples: Sequence[int]) -> list[list[int]] | None:
        self.open()
        plan = self.session.bound.plan
        if plan.serves_dense and not plan.steps_together:
            return None
        return super().agree_on_batches(samples)

    @property
    def is_untrained(self) -> bool:
        return self.session.client.is_untrained

    def finish_background_save(self) -> None:
        # a server that restarts has lost the previous save, and takes part in the next one
        comes_back = self.session.client.servers_restart
        self.background_save.finish(forgives=PeerLostError if comes_back else None)

    def loading(self, saved: Checkpoint, via: str) -> ServedLoading:
        return ServedLoading(self, self.session, saved, via)

    def plain_layers(self, rows: Rows) -> contextlib.AbstractContextManager[PlainLayer]:
        return open_tables(self, self.session, rows)

    def shrink(
        self, unseen_days: int, score: float, decay: float, table: str | None
    ) -> dict[str, ShrunkTable]:
        return shrink_tables(self, self.session, unseen_days, score, decay, table)

    def publish(self, options: PublishOptions) -> RowPublisher | None:
        if self.session.is_open or self.group.alone:
            self.open()
        else:
            raise PlanError(
                "fleet.publish was called before the tables were open; call fleet.init_worker() on "
                "every worker first"
            )
        if self.group.index:
            return None
        if self.publisher is not None and not self.publisher.is_over:
            raise PlanError(
                "fleet.publish was called twice; a job publishes to one target: call stop() of the "
                "first publisher before the second call, or give fleet.publish all tables at once"
            )
        # imported late, since most jobs publish nothing
        from fleetlight.fleet.served.publishing.publisher import Publisher

        self.publisher = Publisher(self, self.session, options)
        self.closers.callback(self.publisher.abandon)
        return self.publisher

    def _say_goodbye(self) -> None:
        report_saying_goodbye(self.role)
        self.group.leave()
        report_left_job(self.role)

    def _delete_durable_state(self) -> None:
        """After the goodbye no process needs it, unless the job resumes.

        The folder of a worker that has left says so; one that stops resumes from a checkpoint.
        """
        if self.session.embedded is not None:
            self.session.embedded.close()
        self.session.client.journal.close(
            is_needed=False, ended=not self.session.client.signals.stopped
        )


@dataclasses.dataclass(kw_only=True)
class CatchingUpJob(ServedJob):
    """A worker whose script repeats what it, or the other workers, did before.

    Until it has caught up, barriers return known results, and no value changes.
    """

    def barrier(self) -> None:
        if not self.replay.is_catching_up:
            super().barrier()
            return
        self.group.barrier("barrier_worker")
        if self.session.is_open and not self.session.bound.plan.steps_together:
            self.group.barrier("barrier_worker")

    @contextlib.contextmanager
    def at_rest(self, *, everything: bool = False) -> Iterator[None]:
        self.open()
        if self.replay.is_catching_up:
            # what the block does is done
            for model in self.models:
                model.freeze()
            yield
            return
        with super().at_rest(everything=everything):
            yield
