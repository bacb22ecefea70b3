# SPDX-License-Identifier: Apache-2.0
"""`CollectiveJob`: a worker of a job without servers; all workers reduce their gradients."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from fleetlight.checkpoint import Checkpoint
from fleetlight.collective.group import Group
from fleetlight.data.queue.client import QueueOptions
from fleetlight.errors import ConfigError, PlanError
from fleetlight.fleet.checkpoints import autosave
from fleetlight.fleet.checkpoints.loading import LocalLoading
from fleetlight.fleet.checkpoints.model_values import LocalValues
from fleetlight.fleet.checkpoints.stop_agreement import PolledAgreement
from fleetlight.fleet.collective.replica_policy import ReplicaPolicy
from fleetlight.fleet.collective.steps import ProgramSteps, ReducedSteps
from fleetlight.fleet.job import Job, ShrunkTable
from fleetlight.fleet.plan.tied_weights import refuse_tied
from fleetlight.fleet.training import local_training
from fleetlight.fleet.training.model import ManagedModel
from fleetlight.fleet.training.optimizer import ManagedOptimizer
from fleetlight.observe.telemetry.registry import Value


@dataclasses.dataclass
class CollectiveJob(Job):
    """Also one process alone, where `fleet.init(is_collective=True)` finds no others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.closers.callback(self.group.leave)

    def metrics(self) -> dict[str, Value]:
        sent = self.dense_group.meter.cost().sent_bytes
        return {**super().metrics(), **({} if sent is None else {"host_sent_bytes": sent})}

    def manage_model(self, module: nn.Module) -> ManagedModel:
        return ManagedModel(module, self, ReplicaPolicy())

    def manage_optimizer(self, optimizer: torch.optim.Optimizer) -> ManagedOptimizer:
        return ManagedOptimizer(optimizer, self, lambda managed: ReducedSteps(managed, _programs))

    def check_model(self, module: nn.Module) -> None:
        # one worker alone may tie weights as it likes
        if not self.group.alone:
            refuse_tied(module, served=False)

    @property
    def averages(self) -> bool:
        return self.strategy.gradient_scale == "mean"

    @property
    def dense_group(self) -> Group:
        assert isinstance(self.group, Group)
        return self.group

    @property
    def collective_group(self) -> Group:
        return self.dense_group

    def clip(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
        # the gradients are those of all workers by now
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def prepare(self) -> None:
        self.agree_on_models()

    def barrier(self) -> None:
        super().barrier()
        local_training.average(self, "barrier_worker")

    def watch_terminations(self) -> None:
        autosave.watch_in_worker(self, PolledAgreement(self.group))

    def shard_queue(self, range_batches: int) -> QueueOptions:
        raise ConfigError(
            "fleet.shard: deal='queue' is for jobs with parameter servers and a_sync=True; in a "
            "collective job all workers make each step together, so all need as many batches: "
            "leave deal out"
        )

    @property
    def reads_tables(self) -> bool:
        return True

    def loading(self, saved: Checkpoint, via: str) -> LocalLoading:
        return LocalLoading(self, saved)

    def values_of(self, model: nn.Module) -> LocalValues:
        return LocalValues(self, model)

    def shrink(
        self, unseen_days: int, score: float, decay: float, table: str | None
    ) -> dict[str, ShrunkTable]:
        raise PlanError(
            "fleet.shrink: this job has no parameter servers, so it has no tables; start it "
            "with fleet.init()"
        )


def _programs() -> ProgramSteps:
    # imported late, since most scripts write no program
    from fleetlight.fleet.collective import programs

    return programs
