# SPDX-License-Identifier: Apache-2.0
"""`CollectiveJob`: a worker among workers that reduce gradients among themselves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fleetlight.checkpoint import Checkpoint
from fleetlight.collective.group import Group
from fleetlight.data.queue.client import QueueOptions
from fleetlight.errors import ConfigError, PlanError
from fleetlight.fleet.checkpoints import stopping
from fleetlight.fleet.checkpoints.loading import LocalLoading
from fleetlight.fleet.checkpoints.model_values import LocalValues
from fleetlight.fleet.checkpoints.stop_calls import MeetingCalls
from fleetlight.fleet.collective.replicating import Replicating
from fleetlight.fleet.collective.steps import ProgramSteps, ReducedSteps
from fleetlight.fleet.job import IdsOf, Job, Rows, ShrunkTable
from fleetlight.fleet.plan.tied_weights import refuse_tied
from fleetlight.fleet.protocols import NoReplay
from fleetlight.fleet.training import local_training
from fleetlight.fleet.training.model import ModelPlan
from fleetlight.fleet.training.optimizer import StepPlan


@dataclasses.dataclass
class CollectiveJob(Job):
    """Also one process alone, where `fleet.init(is_collective=True)` finds no others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.closers.callback(self.group.leave)

    def plan_model(self, module: nn.Module) -> ModelPlan:
        """As in `Job`."""
        return ModelPlan(module, self, Replicating())

    def plan_optimizer(self, optimizer: torch.optim.Optimizer) -> StepPlan:
        """As in `Job`."""
        return StepPlan(optimizer, self, lambda plan: ReducedSteps(plan, _programs))

    def refuse_late(self, call: str) -> None:
        """Nothing comes too late: workers agree anew."""

    def check_model(self, module: nn.Module) -> None:
        """As in `Job`; one worker alone may tie weights as it likes."""
        if not self.group.alone:
            refuse_tied(module, served=False)

    @property
    def averages(self) -> bool:
        """As in `Job`."""
        return self.strategy.gradient_scale == "mean"

    @property
    def dense_group(self) -> Group:
        """All workers."""
        assert isinstance(self.group, Group)
        return self.group

    @property
    def collective_group(self) -> Group:
        """All workers."""
        return self.dense_group

    def clip(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """The gradients are those of all workers already."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def open(self) -> None:
        """There are no servers."""

    def once(self, call: str, action: Callable[[], Sequence[bytes]]) -> Sequence[bytes]:
        """All workers start again together, so none repeats a call alone."""
        return action()

    def cut(self, model: nn.Module, via: str) -> None:
        """There are no servers."""

    def values_of(self, model: nn.Module) -> LocalValues:
        """As in `Job`."""
        return LocalValues(self, model)

    def prepare(self) -> None:
        """As in `Job`."""
        self.agree_on_models()

    def barrier(self) -> None:
        """As in `Job`."""
        self.group.barrier("barrier_worker")
        local_training.meet(self, "barrier_worker")

    @contextlib.contextmanager
    def at_rest(self, *, everything: bool = False) -> Iterator[None]:
        """Nothing is on its way between two steps."""
        yield

    def watch_terminations(self) -> None:
        """As in `Job`."""
        stopping.watch_in_worker(self, MeetingCalls(self.group))

    def finish(self) -> None:
        """All steps are made."""

    def fail(self, error: str, *, consequence: bool) -> None:
        """As in `Job`."""
        self.group.fail(error, consequence=consequence)

    def forget(self) -> None:
        """No layer knows of the job."""

    def refuse_in_server(self, call: str) -> None:
        """This is a worker."""

    def prefetch_hints(self, ids_of_batch: IdsOf | None) -> None:
        """Workers have all rows."""

    def shard_queue(self, range_batches: int) -> QueueOptions:
        """Refuse."""
        raise ConfigError(
            "fleet.shard: deal='queue' is for jobs with parameter servers and a_sync=True; in a "
            "collective job all workers make each step together, so all need as many batches: "
            "leave deal out"
        )

    @property
    def replay(self) -> NoReplay:
        """All workers start again together."""
        return NoReplay()

    @property
    def begins(self) -> bool:
        """As in `Job`; nothing is kept but checkpoints."""
        return False

    @property
    def reads_tables(self) -> bool:
        """As in `Job`."""
        return True

    def finish_save(self) -> None:
        """As in `Job`."""
        self.saving.finish()

    def loading(self, saved: Checkpoint, via: str) -> LocalLoading:
        """As in `Job`."""
        return LocalLoading(self, saved)

    @contextlib.contextmanager
    def stand_ins(self, rows: Rows) -> Iterator[None]:
        """Layers have their rows."""
        yield

    def shrink(
        self, unseen_days: int, score: float, decay: float, table: str | None
    ) -> dict[str, ShrunkTable]:
        """Refuse."""
        raise PlanError(
            "fleet.shrink: this job has no parameter servers, so it has no tables; start it "
            "with fleet.init()"
        )


def _programs() -> ProgramSteps:
    # most scripts write no program, and need not wait for this import
    from fleetlight.fleet.collective import programs

    return programs
