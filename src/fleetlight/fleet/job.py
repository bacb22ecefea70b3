# SPDX-License-Identifier: Apache-2.0
"""`Job`: what this process is in its job, and what the script has registered since `fleet.init`."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fleetlight.checkpoint import Checkpoint
from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.group import Group
from fleetlight.data.loader import ShardLoader
from fleetlight.data.queue.client import QueueOptions
from fleetlight.errors import ConfigError, RoleError
from fleetlight.fleet.parts.background import BackgroundSave
from fleetlight.fleet.parts.loss import LossProbe
from fleetlight.fleet.parts.schedulers import Schedulers
from fleetlight.fleet.protocols import (
    Autosave,
    BatchWeights,
    Loading,
    ModelValues,
    Peers,
    PrefetchHints,
    RegisteredModel,
    RegisteredOptimizer,
    Replay,
    ServerCut,
)
from fleetlight.roles import Role
from fleetlight.security.context import Contexts
from fleetlight.strategy import DistributedStrategy

#: returns the ids that a batch brings to tables, by name
IdsOf = Callable[[Any], Mapping[str, Tensor]]
#: a layer of torch alone in place of one whose rows are on servers
StandIn = Callable[[nn.Module], nn.Module]
#: ids to keep of each table by its name, or "all"
Rows = str | Mapping[str, Tensor]


class ShrunkTable(NamedTuple):
    """How many rows a table has forgotten, and how many are left."""

    removed: int
    left: int


@dataclasses.dataclass
class Job(abc.ABC):
    """One per process, from `fleet.init` to its end; `fleet.init` chooses which, and nobody else.

    `collective.job.CollectiveJob`, `served.job.ServedJob` and `server.job.ServerJob`.
    """

    role: Role
    group: Peers
    strategy: DistributedStrategy
    #: what connections are opened with, whatever strategy comes later; None: plain ones
    tls: Contexts | None = None
    #: the call of the script that gave the strategy; empty: none did
    strategy_from: str = ""
    models: list[RegisteredModel] = dataclasses.field(default_factory=list)
    optimizers: list[RegisteredOptimizer] = dataclasses.field(default_factory=list)
    #: in which form the gradients of models cross between hosts
    compressions: dict[nn.Module, Compression] = dataclasses.field(default_factory=dict)
    loaders: list[ShardLoader[Any]] = dataclasses.field(default_factory=list)
    saving: BackgroundSave = dataclasses.field(default_factory=BackgroundSave)
    #: what the batches of the loaders weigh
    weights: BatchWeights | None = None
    #: the loss of the last backward, where a schedule follows it
    loss_probe: LossProbe | None = None
    #: how the job saves by itself, stops and resumes, where it has a folder for that
    stopping: Autosave | None = None
    #: what `fleet.attach` has made known: learning-rate schedulers, and scalers of losses
    schedulers: Schedulers = dataclasses.field(default_factory=Schedulers)
    scalers: list[torch.amp.GradScaler] = dataclasses.field(default_factory=list)
    #: how many reasons there are to keep gradients local for now
    no_sync_depth: int = 0
    #: optimizer steps made so far
    step: int = 0
    #: where servers and workers keep what outlives them, also once the script has changed directory
    durability_dir: Path = dataclasses.field(init=False)
    #: what is to be done when the job is left; what was opened last is closed first
    closers: contextlib.ExitStack = dataclasses.field(
        init=False, default_factory=contextlib.ExitStack
    )

    def __post_init__(self) -> None:
        self.durability_dir = durability_dir(self.strategy)

    # -- what the script registers

    @abc.abstractmethod
    def plan_model(self, module: nn.Module) -> RegisteredModel:
        """What `distributed_model` registers."""

    @abc.abstractmethod
    def plan_optimizer(self, optimizer: torch.optim.Optimizer) -> RegisteredOptimizer:
        """What `distributed_optimizer` registers."""

    @abc.abstractmethod
    def refuse_late(self, call: str) -> None:
        """PlanError where a model or an optimizer comes too late to be registered."""

    @abc.abstractmethod
    def check_model(self, module: nn.Module) -> None:
        """PlanError for a model that this job cannot train."""

    # -- a step

    @property
    @abc.abstractmethod
    def averages(self) -> bool:
        """True when gradients are averaged; `gradient_scale="sum"` is for collective jobs only."""

    @property
    @abc.abstractmethod
    def dense_group(self) -> Group | None:
        """The workers that reduce dense gradients among themselves; None where servers do."""

    @property
    @abc.abstractmethod
    def collective_group(self) -> Group | None:
        """All workers, where they reduce all gradients among themselves; None beside servers."""

    @abc.abstractmethod
    def clip(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients by their one norm, over all workers where steps are made together."""

    # -- the way of the job

    @abc.abstractmethod
    def open(self) -> None:
        """Agree with the servers on the plan and the first values, where there are any; once."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """What `init_worker` does: the workers agree on the models now."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait for all workers, and leave them equal."""

    @abc.abstractmethod
    def at_rest(self, *, everything: bool = False) -> contextlib.AbstractContextManager[None]:
        """A block in which nothing of this worker is on its way to others."""

    @abc.abstractmethod
    def watch_terminations(self) -> None:
        """From now on SIGTERM saves and stops, where the strategy names a folder."""

    @abc.abstractmethod
    def finish(self) -> None:
        """After the last step: let everything this worker has brought be applied."""

    @abc.abstractmethod
    def fail(self, error: str, *, consequence: bool) -> None:
        """After an error: tell the others why, and wait for nobody."""

    @abc.abstractmethod
    def forget(self) -> None:
        """Leave layers no way to what the job has kept."""

    @abc.abstractmethod
    def refuse_in_server(self, call: str) -> None:
        """RoleError in a parameter server, for what workers do."""

    # -- data

    @abc.abstractmethod
    def prefetch_hints(self, ids_of_batch: IdsOf | None) -> PrefetchHints | None:
        """What a loader tells of the ids of its next batch; None: no rows are fetched."""

    @abc.abstractmethod
    def shard_queue(self, range_batches: int) -> QueueOptions:
        """Where the next loader asks for its records, range by range."""

    # -- state

    @property
    @abc.abstractmethod
    def replay(self) -> Replay:
        """How this worker returns to its last step, after it was killed."""

    @property
    @abc.abstractmethod
    def begins(self) -> bool:
        """True where an empty folder of checkpoints is right: nothing was trained before."""

    @property
    @abc.abstractmethod
    def reads_tables(self) -> bool:
        """True where workers read the tables of a checkpoint, and no server does."""

    @abc.abstractmethod
    def once(self, call: str, action: Callable[[], Sequence[bytes]]) -> Sequence[bytes]:
        """What `action` returns; a later life of this worker gets what an earlier one got."""

    @abc.abstractmethod
    def finish_save(self) -> None:
        """Wait for the save before, in the background; its failure is raised unless forgiven."""

    @abc.abstractmethod
    def cut(self, model: nn.Module, via: str) -> ServerCut | None:
        """What the servers hold now of a checkpoint, on worker 0; None without servers."""

    @abc.abstractmethod
    def loading(self, saved: Checkpoint, via: str) -> Loading:
        """This worker's part in loading a checkpoint."""

    @abc.abstractmethod
    def values_of(self, model: nn.Module) -> ModelValues:
        """All values of a registered model, wherever they are kept."""

    @abc.abstractmethod
    def stand_ins(self, rows: Rows) -> contextlib.AbstractContextManager[StandIn | None]:
        """Inside the block: layers of torch alone; None where all layers have their rows."""

    @abc.abstractmethod
    def shrink(
        self, unseen_days: int, score: float, decay: float, table: str | None
    ) -> dict[str, ShrunkTable]:
        """What `fleet.shrink` does."""

    # -- servers

    def init_server(self, dirname: Path | None) -> None:
        """What `fleet.init_server` does."""
        raise _no_server("init_server")

    def run_server(self) -> None:
        """What `fleet.run_server` does."""
        raise _no_server("run_server")

    # -- the same in every job

    def agree_on_models(self) -> None:
        """Apply the strategy to the models on all workers, and resume where that is asked."""
        for model in self.models:
            model.freeze()
        if self.stopping is not None and self.models:
            self.stopping.take_up()

    def served_steps(self) -> list[RegisteredOptimizer]:
        """The optimizers whose steps the servers take part in."""
        return [one for one in self.optimizers if one.steps_on_servers is not None]


def _no_server(call: str) -> RoleError:
    return RoleError(
        f"fleet.{call} was called in a worker; call it only where fleet.is_server() is true"
    )


def durability_dir(strategy: DistributedStrategy) -> Path:
    """The folder for what outlives a process, wherever this one goes later."""
    folder = Path(strategy.durability_configs.folder)
    return folder if strategy.durability == "none" else folder.absolute()


_job: Job | None = None
#: the last one that there was
_last: weakref.ref[Job] | None = None


def current() -> Job:
    """The job; there is none before `fleet.init`."""
    if _job is None:
        raise ConfigError(
            "Fleetlight is not initialised; call fleet.init() first, or "
            "fleet.init(is_collective=True) for training without parameter servers"
        )
    return _job


def current_or_none() -> Job | None:
    """The job, or None before `fleet.init` and after the job has been left."""
    return _job


def set_current(job: Job | None) -> None:
    """Install the job of this process."""
    global _job, _last
    _job = job
    if job is not None:
        _last = weakref.ref(job)


def last_or_none() -> Job | None:
    """The job, or the last one if it has been left and something still knows of it."""
    return None if _last is None else _last()
