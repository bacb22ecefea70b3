# SPDX-License-Identifier: Apache-2.0
"""`ServerJob`: a parameter server."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from fleetlight.errors import RoleError
from fleetlight.fleet.checkpoints import stopping
from fleetlight.fleet.checkpoints.model_values import ModelValues
from fleetlight.fleet.context import Context
from fleetlight.fleet.served.steps import IdlePolicy, IdleSteps
from fleetlight.fleet.training.model import ModelPlan
from fleetlight.fleet.training.optimizer import OptimizerPlan
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport.listener import Listener


@dataclasses.dataclass
class Service:
    """A server process: what it answers with, and its door."""

    server: Server
    listener: Listener

    def fail(self, error: str) -> None:
        """Tell whoever waits or calls why nothing more comes."""
        self.server.close(error)

    def stop(self, tell_over: Callable[[], None] | None = None) -> None:
        """Serve no more, and remove what is kept once nobody needs it.

        `tell_over` is called before that is removed.
        """
        self.server.refuse()
        # the last goodbyes are answered: who has not heard that would miss this server
        self.listener.stop()
        if tell_over is not None and self.server.is_over:
            tell_over()
        self.server.close()


@dataclasses.dataclass
class ServerJob(Context):
    """It builds the plan from the same script as the workers, and trains nothing."""

    is_served: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.closers.callback(self.group.leave)
        self.closers.callback(lambda: self.own_service.stop())

    @property
    def own_service(self) -> Service:
        """What this process does."""
        assert self.service is not None
        return self.service

    def plan_model(self, module: nn.Module) -> ModelPlan:
        """As in `Context`."""
        return ModelPlan(module, self, IdlePolicy())

    def plan_optimizer(self, optimizer: torch.optim.Optimizer) -> OptimizerPlan:
        """As in `Context`."""
        return OptimizerPlan(optimizer, self, IdleSteps)

    def refuse_late(self, call: str) -> None:
        """A server draws its plan in `init_server`, of what is there by then."""

    @property
    def recovery(self) -> None:
        """Only workers of jobs with servers start again alone."""

    @property
    def dense_group(self) -> None:
        """A server reduces nothing."""

    def clip(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """A server has no gradients."""
        raise RoleError(
            "fleet.clip_grad_norm_ was called in a parameter server; see fleet.is_server()"
        )

    def open(self) -> None:
        """A server opens in `init_server`."""

    def once(self, call: str, action: Callable[[], Sequence[bytes]]) -> Sequence[bytes]:
        """A server makes no calls that others answer."""
        return action()

    def cut(self, model: nn.Module, via: str) -> None:
        """A server is asked for its part by worker 0."""

    def values_of(self, model: nn.Module) -> ModelValues:
        """A server has a part of them."""
        raise RoleError("the values of a model were asked for in a parameter server")

    def prepare(self) -> None:
        """A server is no worker."""
        raise RoleError("fleet.init_worker was called in a parameter server; see fleet.is_server()")

    def server(self, call: str) -> Service:
        """As in `Context`."""
        return self.own_service

    def barrier(self) -> None:
        """Workers meet without it."""
        self.group.barrier("barrier_worker")

    @contextlib.contextmanager
    def at_rest(self, *, everything: bool = False) -> Iterator[None]:
        """A server sends nothing by itself."""
        yield

    def watch_terminations(self) -> None:
        """As in `Context`."""
        stopping.watch_in_server(self)

    def finish(self) -> None:
        """A server has nothing to bring."""

    def fail(self, error: str, *, consequence: bool) -> None:
        """As in `Context`."""
        self.own_service.fail(error)
        self.group.fail(error, consequence=consequence)

    def forget(self) -> None:
        """No layer of a server knows of the job."""
