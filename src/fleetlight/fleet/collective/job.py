# SPDX-License-Identifier: Apache-2.0
"""`CollectiveJob`: a worker among workers that reduce gradients among themselves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from fleetlight.collective.group import Group
from fleetlight.fleet.checkpoints import stopping
from fleetlight.fleet.checkpoints.model_values import LocalValues
from fleetlight.fleet.checkpoints.stop_calls import MeetingCalls
from fleetlight.fleet.collective.replicating import Replicating
from fleetlight.fleet.collective.steps import ReducedSteps
from fleetlight.fleet.context import Context
from fleetlight.fleet.training import local_training
from fleetlight.fleet.training.model import ModelPlan
from fleetlight.fleet.training.optimizer import OptimizerPlan

if TYPE_CHECKING:
    from fleetlight.fleet.server.job import Service


@dataclasses.dataclass
class CollectiveJob(Context):
    """Also one process alone, where `fleet.init(is_collective=True)` finds no others."""

    is_served: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.closers.callback(self.group.leave)

    def plan_model(self, module: nn.Module) -> ModelPlan:
        """As in `Context`."""
        return ModelPlan(module, self, Replicating())

    def plan_optimizer(self, optimizer: torch.optim.Optimizer) -> OptimizerPlan:
        """As in `Context`."""
        return OptimizerPlan(optimizer, self, ReducedSteps)

    def refuse_late(self, call: str) -> None:
        """Nothing comes too late: workers agree anew."""

    @property
    def recovery(self) -> None:
        """Only workers of jobs with servers start again alone."""

    @property
    def dense_group(self) -> Group:
        """All workers."""
        assert isinstance(self.group, Group)
        return self.group

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
        """As in `Context`."""
        return LocalValues(self, model)

    def prepare(self) -> None:
        """As in `Context`."""
        self.agree_on_models()

    def server(self, call: str) -> Service:
        """As in `Context`."""
        raise self.no_server(call)

    def barrier(self) -> None:
        """As in `Context`."""
        self.group.barrier("barrier_worker")
        local_training.meet(self, "barrier_worker")

    @contextlib.contextmanager
    def at_rest(self, *, everything: bool = False) -> Iterator[None]:
        """Nothing is on its way between two steps."""
        yield

    def watch_terminations(self) -> None:
        """As in `Context`."""
        stopping.watch_in_worker(self, MeetingCalls(self.group))

    def finish(self) -> None:
        """All steps are made."""

    def fail(self, error: str, *, consequence: bool) -> None:
        """As in `Context`."""
        self.group.fail(error, consequence=consequence)

    def forget(self) -> None:
        """No layer knows of the job."""
