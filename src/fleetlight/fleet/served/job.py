# SPDX-License-Identifier: Apache-2.0
"""`ServedJob`: a worker of a job with parameter servers, or one process with a server inside."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fleetlight.checkpoint import Checkpoint
from fleetlight.collective.group import Group
from fleetlight.data.queue.client import QueueOptions
from fleetlight.errors import PeerError, PeerLostError, PlanError
from fleetlight.fleet.checkpoints import stopping
from fleetlight.fleet.exit.exit_status import report_left, report_parting
from fleetlight.fleet.job import IdsOf, Job, Rows, ShrunkTable, StandIn
from fleetlight.fleet.plan.tied_weights import refuse_tied
from fleetlight.fleet.served.durable.replay import StepReplay
from fleetlight.fleet.served.prefetch_hints import IdHints
from fleetlight.fleet.served.session import ServerSession
from fleetlight.fleet.served.shard_queue import ShardQueueClient
from fleetlight.fleet.served.steps import ServedPolicy, ServedSteps, served_programs
from fleetlight.fleet.served.stop_calls import ServedCalls
from fleetlight.fleet.served.tables.frozen_tables import open_tables
from fleetlight.fleet.served.tables.loading import ServedLoading
from fleetlight.fleet.served.tables.server_checkpoint import ServerCheckpoint
from fleetlight.fleet.served.tables.shrinking import shrink_tables
from fleetlight.fleet.served.tables.values import ServedValues
from fleetlight.fleet.training.model import ModelPlan
from fleetlight.fleet.training.optimizer import StepPlan
from fleetlight.ps.plan import GEO
from fleetlight.ps.worker.communicator.base import norm_of
from fleetlight.ps.worker.served_group import ServedGroup


@dataclasses.dataclass(kw_only=True)
class ServedJob(Job):
    """Gradients go to the servers, and values come back."""

    #: this worker's part in the job
    session: ServerSession
    #: the optimizers whose steps the servers take part in
    steps: list[ServedSteps] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.session.replay.attach(self, lambda: self.session.drawn.dense)
        self.closers.callback(self._drop_what_was_kept)
        self.closers.callback(self._say_goodbye)
        self.closers.callback(self.session.leave)

    @property
    def _crew(self) -> ServedGroup:
        assert isinstance(self.group, ServedGroup)
        return self.group

    def plan_model(self, module: nn.Module) -> ModelPlan:
        """As in `Job`."""
        return ModelPlan(module, self, ServedPolicy())

    def plan_optimizer(self, optimizer: torch.optim.Optimizer) -> StepPlan:
        """As in `Job`."""
        return StepPlan(optimizer, self, self._stepping)

    def _stepping(self, plan: StepPlan) -> ServedSteps:
        steps = ServedSteps(plan, self.session, served_programs)
        self.steps.append(steps)
        return steps

    def check_model(self, module: nn.Module) -> None:
        """As in `Job`."""
        refuse_tied(module, served=True)

    def refuse_late(self, call: str) -> None:
        """The plan is drawn once."""
        if not self.session.is_open:
            return
        anew = (
            ", or, to train another model from here on, call fleet.reset() and then fleet.init()"
            if self.group.alone
            else ""
        )
        raise PlanError(
            f"{call} came after fleet.init_worker() or the first forward, when the servers had "
            f"made their tables; call it before{anew}"
        )

    @property
    def averages(self) -> bool:
        """Servers take means."""
        return True

    @property
    def dense_group(self) -> Group | None:
        """As in `Job`; with `dense="allreduce"`, once the job is open."""
        return self.session.dense_group

    @property
    def collective_group(self) -> None:
        """Servers have a part in every step."""

    def clip(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """In sync mode only the servers know the gradients of all workers together."""
        for model in self.models:
            model.freeze()
        owners = self._owners({id(parameter) for parameter in parameters})
        updates = [steps.update() for steps in owners]
        merges = [steps.plan.merge for steps in owners]
        if any(merge is not None and merge.is_between() for merge in merges):
            return torch.tensor(norm_of(updates, norm_type))
        norm = self.session.clip(updates, max_norm, norm_type)
        for steps in owners:
            steps.norm = norm
        return torch.tensor(norm)

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
        """As in `Job`."""
        self.session.open(self)

    def once(self, call: str, action: Callable[[], Sequence[bytes]]) -> Sequence[bytes]:
        """As in `Job`."""
        return self.session.client.answers.once(call, action)

    def cut(self, model: nn.Module, via: str) -> ServerCheckpoint:
        """As in `Job`; the servers write one thing at a time."""
        self.saving.finish()
        return ServerCheckpoint(self, self.session, model, via)

    def values_of(self, model: nn.Module) -> ServedValues:
        """As in `Job`."""
        return ServedValues(self, self.session, model)

    def prepare(self) -> None:
        """As in `Job`."""
        self.open()
        self.agree_on_models()

    def barrier(self) -> None:
        """As in `Job`."""
        self.session.barrier(self)

    @contextlib.contextmanager
    def at_rest(self, *, everything: bool = False) -> Iterator[None]:
        """Inside the block nothing of this worker is on its way to the servers.

        Under GeoSGD, or if `everything` is to be, workers and servers are equal after it.
        """
        self.open()
        for model in self.models:
            model.freeze()
        communicator = self.session.communicator
        if self.session.replay.is_catching_up:
            # an earlier life of this worker has done what follows
            yield
            return
        forced = everything or self.session.drawn.plan.mode == GEO
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
        """As in `Job`."""
        crew = self._crew
        stopping.watch_in_worker(self, ServedCalls(self, self.session, crew))
        if self.stopping is not None:
            crew.when_left_alone = self.stopping.left_alone

    def finish(self) -> None:
        """The last pushes; when they fail, the others are told, and no goodbye follows."""
        try:
            for loader in self.loaders:
                loader.source.give_back()
            self.session.stop()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            self.group.fail(text)
            self.session.fail(text)
            raise

    def fail(self, error: str, *, consequence: bool) -> None:
        """As in `Job`."""
        self.session.fail(error)
        self.group.fail(error, consequence=consequence)

    def forget(self) -> None:
        """As in `Job`."""
        self.session.let_go()
        self.steps.clear()

    def refuse_in_server(self, call: str) -> None:
        """This is a worker."""

    def prefetch_hints(self, ids_of_batch: IdsOf | None) -> IdHints:
        """As in `Job`."""
        return IdHints(self, self.session, ids_of_batch)

    def shard_queue(self, range_batches: int) -> QueueOptions:
        """As in `Job`."""
        return QueueOptions(ShardQueueClient(self, self.session, len(self.loaders)), range_batches)

    @property
    def replay(self) -> StepReplay:
        """As in `Job`."""
        return self.session.replay

    @property
    def begins(self) -> bool:
        """As in `Job`; a worker that was killed before its first step begins again."""
        return self.session.client.begins

    @property
    def reads_tables(self) -> bool:
        """Servers read them."""
        return False

    def finish_save(self) -> None:
        """Where a server has died over the save before, the coming one takes its place."""
        comes_back = self.session.client.waits_for_comebacks
        self.saving.finish(forgives=PeerLostError if comes_back else None)

    def loading(self, saved: Checkpoint, via: str) -> ServedLoading:
        """As in `Job`."""
        return ServedLoading(self, self.session, saved, via)

    def stand_ins(self, rows: Rows) -> contextlib.AbstractContextManager[StandIn]:
        """As in `Job`."""
        return open_tables(self, self.session, rows)

    def shrink(
        self, unseen_days: int, score: float, decay: float, table: str | None
    ) -> dict[str, ShrunkTable]:
        """As in `Job`."""
        return shrink_tables(self, self.session, unseen_days, score, decay, table)

    def _say_goodbye(self) -> None:
        report_parting(self.role)
        self.group.leave()
        report_left(self.role)

    def _drop_what_was_kept(self) -> None:
        """After the goodbye nobody asks for it any more, unless the job resumes.

        A worker that has left says so in its folder; one that stops is resumed from a checkpoint.
        """
        if self.session.embedded is not None:
            self.session.embedded.close()
        if self.session.client.redo is not None:
            self.session.client.redo.close(is_needed=False, ended=not self._crew.stopped)
