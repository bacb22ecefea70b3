# SPDX-License-Identifier: Apache-2.0
"""`ServerJob`: a parameter server."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fleetlight.checkpoint import Checkpoint
from fleetlight.data.queue.client import QueueOptions
from fleetlight.errors import ConfigError, RoleError
from fleetlight.fleet.checkpoints.former_names import read_named
from fleetlight.fleet.checkpoints.stopping import Stopped, Terminations
from fleetlight.fleet.exit.exit_status import (
    report_over,
    report_returning,
    report_stopped,
    report_stops,
)
from fleetlight.fleet.job import IdsOf, Job, Rows, ShrunkTable, set_current
from fleetlight.fleet.plan.tied_weights import refuse_tied
from fleetlight.fleet.protocols import Loading, ModelValues, NoReplay
from fleetlight.fleet.served import figures
from fleetlight.fleet.served.durable.durability_dir import durable_of
from fleetlight.fleet.served.session import bound_plan_of
from fleetlight.fleet.served.shard_queue import NoDealer
from fleetlight.fleet.served.steps import served_programs
from fleetlight.fleet.served.tables.loading import open_loaded
from fleetlight.fleet.server.policies import IdlePolicy, IdleSteps
from fleetlight.fleet.training.model import ModelPlan
from fleetlight.fleet.training.optimizer import StepPlan
from fleetlight.observe.log import logger
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport.listener import Listener


@dataclasses.dataclass
class ServerProcess:
    """A server process: what it answers with, and its door."""

    server: Server
    listener: Listener

    def fail(self, error: str) -> None:
        """Tell workers that wait or call why nothing more comes."""
        self.server.close(error)

    def stop(self, report_over: Callable[[], None] | None = None) -> None:
        """Serve no more, and remove what is kept once nobody needs it.

        `report_over` is called before that is removed.
        """
        self.server.refuse()
        # the last goodbyes are answered: who has not heard that would miss this server
        self.listener.stop()
        if report_over is not None and self.server.is_over:
            report_over()
        self.server.close()


@dataclasses.dataclass(kw_only=True)
class ServerJob(Job):
    """It builds the plan from the same script as the workers, and trains nothing."""

    #: what this process does
    process: ServerProcess

    def __post_init__(self) -> None:
        super().__post_init__()
        self.closers.callback(self.group.leave)
        self.closers.callback(self.process.stop)

    def init_server(self, dirname: Path | None) -> None:
        """As in `Job`."""
        drawn, durable, server = bound_plan_of(self), durable_of(self), self.process.server
        if dirname is None:
            server.open(drawn.plan, drawn.optimizers, drawn.dense, durable=durable)
        else:
            read = functools.partial(read_named, self)
            open_loaded(server, drawn, dirname, durable, read)
        if drawn.plan.durability != "none":
            report_returning(self.role)

    def run_server(self) -> None:
        """As in `Job`; it says so if the job is to resume."""
        process = self.process
        if not process.server.is_open:
            raise ConfigError(
                "fleet.run_server was called before fleet.init_server; workers would wait for "
                "tables that nobody makes"
            )
        try:
            process.server.wait()
            logger.info("%s", figures.of_server(process.server.figures()))
        except BaseException:
            process.stop()
            raise
        process.stop(lambda: report_over(self.role))
        set_current(None)
        if process.server.stopped:
            report_stopped(self.role, self.step, self.strategy.checkpoint)
            raise Stopped

    def plan_model(self, module: nn.Module) -> ModelPlan:
        """As in `Job`."""
        return ModelPlan(module, self, IdlePolicy())

    def plan_optimizer(self, optimizer: torch.optim.Optimizer) -> StepPlan:
        """As in `Job`."""
        return StepPlan(optimizer, self, lambda plan: IdleSteps(plan, served_programs))

    def refuse_late(self, call: str) -> None:
        """A server builds its plan in `init_server`, of what is there by then."""

    def check_model(self, module: nn.Module) -> None:
        """As in `Job`."""
        refuse_tied(module, served=True)

    @property
    def averages(self) -> bool:
        """As in `Job`."""
        return True

    @property
    def dense_group(self) -> None:
        """A server reduces nothing."""

    @property
    def collective_group(self) -> None:
        """A server reduces nothing."""

    def clip(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """A server has no gradients."""
        raise _in_server("clip_grad_norm_")

    def open(self) -> None:
        """A server opens in `init_server`."""

    def prepare(self) -> None:
        """A server is no worker."""
        raise _in_server("init_worker")

    def barrier(self) -> None:
        """Workers meet without it."""
        self.group.barrier("barrier_worker")

    @contextlib.contextmanager
    def at_rest(self, *, everything: bool = False) -> Iterator[None]:
        """A server sends nothing by itself."""
        yield

    def watch_terminations(self) -> None:
        """As in `Job`."""
        if self.strategy.checkpoint:
            self.closers.callback(ServerTerminations(self).close)

    def finish(self) -> None:
        """A server has nothing to bring."""

    def fail(self, error: str, *, consequence: bool) -> None:
        """As in `Job`."""
        self.process.fail(error)
        self.group.fail(error, consequence=consequence)

    def forget(self) -> None:
        """No layer of a server knows of the job."""

    def refuse_in_server(self, call: str) -> None:
        """As in `Job`."""
        raise RoleError(
            f"fleet.{call} was called in a parameter server; call it only where fleet.is_worker() "
            "is true"
        )

    def prefetch_hints(self, ids_of_batch: IdsOf | None) -> None:
        """A server reads no batch."""

    def shard_queue(self, range_batches: int) -> QueueOptions:
        """As in `Job`; reading the loader is an error."""
        return QueueOptions(NoDealer(), range_batches)

    @property
    def replay(self) -> NoReplay:
        """Only workers are replayed."""
        return NoReplay()

    @property
    def begins(self) -> bool:
        """As in `Job`."""
        return False

    @property
    def reads_tables(self) -> bool:
        """As in `Job`."""
        return False

    def once(self, call: str, action: Callable[[], Sequence[bytes]]) -> Sequence[bytes]:
        """A server makes no calls that others answer."""
        return action()

    def finish_save(self) -> None:
        """A server saves its part when worker 0 asks."""

    def cut(self, model: nn.Module, via: str) -> None:
        """A server is asked for its part by worker 0."""

    def loading(self, saved: Checkpoint, via: str) -> Loading:
        """A server is told its part by worker 0."""
        raise _in_server("load_persistables")

    def values_of(self, model: nn.Module) -> ModelValues:
        """A server has a part of them."""
        raise _in_server("state_dict")

    @contextlib.contextmanager
    def stand_ins(self, rows: Rows) -> Iterator[None]:
        """A server exports nothing."""
        yield

    def shrink(
        self, unseen_days: int, score: float, decay: float, table: str | None
    ) -> dict[str, ShrunkTable]:
        """A server is told by worker 0."""
        raise _in_server("shrink")


class ServerTerminations(Terminations):
    """A server that is asked to stop asks the workers to, and ends when they have."""

    def __init__(self, job: ServerJob) -> None:
        super().__init__()
        self._job = job
        report_stops(job.role)

    def noted(self) -> None:
        """Workers hear it with the next reply."""
        self._job.process.server.call_stop()


def _in_server(call: str) -> RoleError:
    return RoleError(f"fleet.{call} was called in a parameter server; see fleet.is_server()")
