# SPDX-License-Identifier: Apache-2.0
"""`ServerJob`: a parameter server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fleetlight.checkpoint import Checkpoint
from fleetlight.collective.local_training.engine import LocalTrainingEngine
from fleetlight.data.queue.client import QueueOptions
from fleetlight.errors import ConfigError, PlanError, RoleError
from fleetlight.fleet.checkpoints.autosave import SigtermHandler, Stopped
from fleetlight.fleet.exit.exit_status import (
    report_restartable,
    report_saves_at_sigterm,
    report_server_done,
    report_stopped,
)
from fleetlight.fleet.job import Job, ShrunkTable, set_current
from fleetlight.fleet.parts import summaries
from fleetlight.fleet.plan.bound_plan import bound_plan_of
from fleetlight.fleet.plan.durability_dir import durable_of
from fleetlight.fleet.plan.tied_weights import refuse_tied
from fleetlight.fleet.protocols import Loading, LocalSteps, ModelValues, RegisteredModel
from fleetlight.fleet.served.shard_queue import NoShardQueue
from fleetlight.fleet.served.steps import ServedPrograms, served_programs
from fleetlight.fleet.served.tables.loading import open_loaded
from fleetlight.fleet.training.model import ManagedModel
from fleetlight.fleet.training.optimizer import ManagedOptimizer
from fleetlight.observe.log import logger
from fleetlight.observe.telemetry.registry import Value
from fleetlight.ps.rendezvous.client import Announcer
from fleetlight.ps.server.server import Server
from fleetlight.ps.transport.listener import Listener

if TYPE_CHECKING:
    from fleetlight.static.program import Program
    from fleetlight.static.writing.recorder import Part


class IdlePolicy:
    """The policy of models in a parameter server, which does not train."""

    watches_calls: ClassVar[bool] = True

    def agree(self, model: ManagedModel) -> None:
        """There is no forward."""

    def run(self, model: ManagedModel, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        raise PlanError(
            "the model was called in a parameter server, where nothing trains; call it where "
            "fleet.is_worker() is true"
        )

    def weight(self, model: ManagedModel) -> float:
        return model.batch_weight

    def means(self, model: ManagedModel) -> None:
        """A server takes no part in averages."""

    def close(self) -> None:
        """There is nothing to close."""


class IdleSteps:
    """The policy of optimizers in a parameter server, which does not train."""

    local_steps: LocalSteps | None = None

    def __init__(self, managed: ManagedOptimizer, programs: Callable[[], ServedPrograms]) -> None:
        self.managed, self._programs = managed, programs

    @property
    def steps_on_servers(self) -> None:
        """A server makes the steps of all workers, and counts none here."""

    def count_on_servers(self, steps: int) -> None:
        """A server counts no steps here."""

    def begin(self) -> None:
        """The strategy is in the plan of the server."""

    def resume_local(self, load: Callable[[LocalTrainingEngine], None]) -> None:
        """There is no local training."""

    def update_trained(self, model: RegisteredModel) -> None:
        """There is no forward."""

    def make_ready(self) -> None:
        """A server has no gradients."""

    def before(self, args: Any, kwargs: Any) -> Any:
        raise PlanError(
            "optimizer.step was called in a parameter server, where nothing trains; call it where "
            "fleet.is_worker() is true"
        )

    def after(self) -> None:
        """There is no step."""

    def register(self, program: Program) -> Collection[Part]:
        """Register a program; return the parts of its training that this process writes."""
        self._programs().register(self.managed, program)
        return ()

    def distribute(self, program: Program) -> None:
        self._programs().distribute(self.managed, program)

    def release(self) -> None:
        """Nothing was changed."""


@dataclasses.dataclass
class ServerProcess:
    """The server of a process, and the listener through which workers reach it."""

    server: Server
    listener: Listener
    #: says where this server listens, if no variable does
    announcer: Announcer | None = None

    def fail(self, error: str) -> None:
        """Send an error to the workers that wait for replies or call later."""
        self.server.close(error)

    def stop(self, report_done: Callable[[], None] | None = None, error: str = "") -> None:
        """Stop serving, and delete the durable state once no process needs it.

        `report_done` runs before the deletion; `error` is why the server failed.
        """
        self.server.refuse()
        if self.announcer is not None:
            self.announcer.stop(error)
        # replies to the last goodbyes must arrive: a worker without one would miss this server
        self.listener.stop()
        if report_done is not None and self.server.is_over:
            report_done()
        self.server.close()


@dataclasses.dataclass(kw_only=True)
class ServerJob(Job):
    """It builds the plan from the same script as the workers, and trains nothing."""

    process: ServerProcess

    def __post_init__(self) -> None:
        super().__post_init__()
        self.closers.callback(self.group.leave)
        self.closers.callback(self.process.stop)

    def init_server(self, dirname: str | None) -> None:
        bound, durable, server = bound_plan_of(self), durable_of(self), self.process.server
        if dirname is None:
            server.open(bound.plan, bound.optimizers, bound.dense, durable=durable)
        else:
            open_loaded(server, bound, dirname, durable)
        if bound.plan.durability != "none":
            report_restartable(self.role)

    def run_server(self) -> None:
        """Serve until all workers have left; raises `Stopped` if the job is to resume."""
        process = self.process
        if not process.server.is_open:
            raise ConfigError(
                "fleet.run_server was called before fleet.init_server, which makes the tables "
                "that workers wait for; call fleet.init_server() first"
            )
        try:
            process.server.wait()
            logger.info("%s", summaries.server_summary(process.server.metrics()))
        except BaseException as error:
            process.stop(error=str(error) or type(error).__name__)
            raise
        process.stop(lambda: report_server_done(self.role))
        set_current(None)
        if process.server.stopped:
            report_stopped(self.role, self.step, self.strategy.checkpoint)
            raise Stopped

    def metrics(self) -> dict[str, Value]:
        return summaries.server_metrics(self.process.server.metrics())

    def manage_model(self, module: nn.Module) -> ManagedModel:
        return ManagedModel(module, self, IdlePolicy())

    def manage_optimizer(self, optimizer: torch.optim.Optimizer) -> ManagedOptimizer:
        return ManagedOptimizer(
            optimizer, self, lambda managed: IdleSteps(managed, served_programs)
        )

    def check_model(self, module: nn.Module) -> None:
        refuse_tied(module, served=True)

    def clip(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
        raise _in_server("clip_grad_norm_")

    def prepare(self) -> None:
        raise _in_server("init_worker")

    def watch_terminations(self) -> None:
        if self.strategy.checkpoint:
            self.closers.callback(ServerSigtermHandler(self).close)

    def fail(self, error: str, *, consequence: bool) -> None:
        self.process.fail(error)
        super().fail(error, consequence=consequence)

    def refuse_in_server(self, call: str) -> None:
        raise _in_server(call)

    def shard_queue(self, range_batches: int) -> QueueOptions:
        return QueueOptions(NoShardQueue(), range_batches)

    def loading(self, saved: Checkpoint, via: str) -> Loading:
        raise _in_server("load_persistables")

    def values_of(self, model: nn.Module) -> ModelValues:
        raise _in_server("state_dict")

    def shrink(
        self, unseen_days: int, score: float, decay: float, table: str | None
    ) -> dict[str, ShrunkTable]:
        raise _in_server("shrink")


class ServerSigtermHandler(SigtermHandler):
    """At SIGTERM the server asks the workers to stop, and ends after they have."""

    def __init__(self, job: ServerJob) -> None:
        super().__init__()
        self._job = job
        report_saves_at_sigterm(job.role)

    def on_sigterm(self) -> None:
        """Stop the workers with the next reply to each."""
        self._job.process.server.call_stop()


def _in_server(call: str) -> RoleError:
    return RoleError(
        f"fleet.{call} was called in a parameter server; call it only where fleet.is_worker() "
        "is true"
    )
