# SPDX-License-Identifier: Apache-2.0
"""`Context`: what `fleet.init` found out and what the script has registered since."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fleetlight.errors import ConfigError
from fleetlight.fleet.job import Peers
from fleetlight.fleet.saving import BackgroundSave
from fleetlight.roles import Role
from fleetlight.security.encryption import Encryption, encryption_of
from fleetlight.strategy import DistributedStrategy

if TYPE_CHECKING:
    from fleetlight.collective.codecs.compression import Compression
    from fleetlight.data.loader import ShardLoader
    from fleetlight.fleet.joining import Service
    from fleetlight.fleet.model import ModelPlan
    from fleetlight.fleet.optimizer import OptimizerPlan
    from fleetlight.fleet.repeated import Asked
    from fleetlight.fleet.schedulers import Schedulers
    from fleetlight.fleet.seen_loss import SeenLoss
    from fleetlight.fleet.session import Session
    from fleetlight.fleet.sharding import Weights
    from fleetlight.fleet.stopping import Stopping, Terminations


@dataclasses.dataclass
class Context:
    """One per process, from `fleet.init` to its end."""

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
    #: what notes SIGTERM; in a worker the same
    terminations: Terminations | None = None
    #: how many reasons there are to keep gradients local for now
    holds: int = 0
    #: optimizer steps made so far
    step: int = 0
    #: where servers and workers keep what outlives them, also once the script has changed directory
    kept_in: Path = dataclasses.field(init=False)
    #: what connections are opened with, whatever strategy comes later
    encryption: Encryption | None = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.encryption = encryption_of(self.strategy)
        self.kept_in = kept_in(self.strategy)

    @property
    def is_served(self) -> bool:
        """True in a job with parameter servers, in either kind of process."""
        return self.session is not None or self.service is not None

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
