# SPDX-License-Identifier: Apache-2.0
"""`Context`: what `fleet.init` found out and what the script has registered since."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fleetlight.errors import ConfigError, RoleError
from fleetlight.fleet.checkpoints.background import BackgroundSave
from fleetlight.fleet.checkpoints.schedulers import Schedulers
from fleetlight.fleet.job import Peers
from fleetlight.roles import Role
from fleetlight.security.encryption import Encryption, encryption_of
from fleetlight.strategy import DistributedStrategy

if TYPE_CHECKING:
    from fleetlight.collective.codecs.compression import Compression
    from fleetlight.collective.group import Group
    from fleetlight.data.loader import ShardLoader
    from fleetlight.fleet.checkpoints.model_values import ModelValues
    from fleetlight.fleet.checkpoints.stopping import Stopping
    from fleetlight.fleet.public.sharding import Weights
    from fleetlight.fleet.repeated import Asked
    from fleetlight.fleet.served.replay import Recovery
    from fleetlight.fleet.served.session import Session
    from fleetlight.fleet.served.tables.server_checkpoint import ServedCut
    from fleetlight.fleet.server.job import Service
    from fleetlight.fleet.training.loss import SeenLoss
    from fleetlight.fleet.training.model import ModelPlan
    from fleetlight.fleet.training.optimizer import OptimizerPlan


@dataclasses.dataclass
class Context(abc.ABC):
    """One per process, from `fleet.init` to its end: what it is in its job (`fleet.jobs`)."""

    #: True in a job with parameter servers, in either kind of process
    is_served: ClassVar[bool]

    role: Role
    group: Peers
    strategy: DistributedStrategy
    #: the call of the script that gave the strategy; empty: nobody did
    strategy_from: str = ""
    #: what `fleet.init` was called with; None until it has succeeded
    asked: Asked | None = None
    models: list[ModelPlan] = dataclasses.field(default_factory=list)
    optimizers: list[OptimizerPlan] = dataclasses.field(default_factory=list)
    #: in which form the gradients of models cross between hosts
    compressions: dict[nn.Module, Compression] = dataclasses.field(default_factory=dict)
    loaders: list[ShardLoader[Any]] = dataclasses.field(default_factory=list)
    saving: BackgroundSave = dataclasses.field(default_factory=BackgroundSave)
    #: this worker's part in a job with parameter servers
    session: Session | None = None
    #: what this process is, when it is a parameter server
    service: Service | None = None
    #: what the batches of the loaders weigh
    weights: Weights | None = None
    #: the loss of the last backward, where somebody follows it
    seen_loss: SeenLoss | None = None
    #: how the job saves by itself, stops and goes on, where it has a folder for that
    stopping: Stopping | None = None
    #: the learning-rate schedulers of the script, where somebody goes on with them
    schedulers: Schedulers | None = None
    #: how many reasons there are to keep gradients local for now
    holds: int = 0
    #: optimizer steps made so far
    step: int = 0
    #: where servers and workers keep what outlives them, also once the script has changed directory
    kept_in: Path = dataclasses.field(init=False)
    #: what is to be done when the job is left; what was opened last is closed first
    closers: contextlib.ExitStack = dataclasses.field(
        init=False, default_factory=contextlib.ExitStack
    )
    #: what connections are opened with, whatever strategy comes later
    encryption: Encryption | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.encryption = encryption_of(self.strategy)
        self.kept_in = kept_in(self.strategy)

    @abc.abstractmethod
    def plan_model(self, module: nn.Module) -> ModelPlan:
        """What `distributed_model` registers."""

    @abc.abstractmethod
    def plan_optimizer(self, optimizer: torch.optim.Optimizer) -> OptimizerPlan:
        """What `distributed_optimizer` registers."""

    @abc.abstractmethod
    def refuse_late(self, call: str) -> None:
        """PlanError where a model or an optimizer comes too late to be registered."""

    @property
    @abc.abstractmethod
    def recovery(self) -> Recovery | None:
        """How this worker goes on where an earlier life was, where it keeps what that takes."""

    @property
    @abc.abstractmethod
    def dense_group(self) -> Group | None:
        """The workers that reduce dense gradients among themselves; None where servers do."""

    @abc.abstractmethod
    def clip(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Scale gradients by their one norm, over all workers where steps are made together."""

    @abc.abstractmethod
    def open(self) -> None:
        """Agree with the servers on the plan and the first values, where there are any; once."""

    @abc.abstractmethod
    def once(self, call: str, action: Callable[[], Sequence[bytes]]) -> Sequence[bytes]:
        """What `action` returns; a later life of this worker gets what an earlier one got."""

    @abc.abstractmethod
    def cut(self, model: nn.Module, via: str) -> ServedCut | None:
        """What the servers hold now of a checkpoint, on worker 0; None without servers."""

    @abc.abstractmethod
    def values_of(self, model: nn.Module) -> ModelValues:
        """All values of a registered model, wherever they are kept."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """What `init_worker` does: the workers agree on the models now."""

    @abc.abstractmethod
    def server(self, call: str) -> Service:
        """This process as a server; RoleError in a worker."""

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

    @property
    def is_catching_up(self) -> bool:
        """True in a worker that was started again, until its script is where it was."""
        return self.recovery is not None and self.recovery.is_catching_up

    def agree_on_models(self) -> None:
        """Apply the strategy to the models, all workers alike, and resume where that is asked."""
        for model in self.models:
            model.freeze()
        if self.stopping is not None and self.models:
            self.stopping.take_up()

    def note_schedulers(self) -> None:
        """From now on the learning-rate schedulers of the script are known, once."""
        if self.schedulers is None:
            self.schedulers = Schedulers()
            self.closers.callback(self.schedulers.close)

    def no_server(self, call: str) -> RoleError:
        """The error where a worker calls what only servers do."""
        return RoleError(
            f"fleet.{call} was called in a worker; call it only where fleet.is_server() is true"
        )

    @property
    def averages(self) -> bool:
        """True when gradients are averaged; `gradient_scale="sum"` is for collective jobs only."""
        return self.is_served or self.strategy.gradient_scale == "mean"


def kept_in(strategy: DistributedStrategy) -> Path:
    """The folder for what outlives a process, wherever this one goes later."""
    folder = Path(strategy.durability_configs.folder)
    return folder if strategy.durability == "none" else folder.absolute()


_context: Context | None = None
#: the last one that there was
_last: weakref.ref[Context] | None = None


def current() -> Context:
    """The context; there is none before `fleet.init`."""
    if _context is None:
        raise ConfigError(
            "Fleetlight is not initialised; call fleet.init() first, or "
            "fleet.init(is_collective=True) for training without parameter servers"
        )
    return _context


def current_or_none() -> Context | None:
    """The context, or None before `fleet.init` and after the job has been left."""
    return _context


def set_current(context: Context | None) -> None:
    """Install the context of this process."""
    global _context, _last
    _context = context
    if context is not None:
        _last = weakref.ref(context)


def last_or_none() -> Context | None:
    """The context, or the last one if the job has been left and something still knows of it."""
    return None if _last is None else _last()
