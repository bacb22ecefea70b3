# SPDX-License-Identifier: Apache-2.0
"""`Context`: what `fleet.init` found out and what the script has registered since."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from fleetlight.collective.group import Group
from fleetlight.errors import ConfigError
from fleetlight.roles import Role
from fleetlight.strategy import DistributedStrategy

if TYPE_CHECKING:
    from fleetlight.data.loader import ShardLoader
    from fleetlight.fleet.model import ModelPlan
    from fleetlight.fleet.optimizer import OptimizerPlan
    from fleetlight.fleet.sharding import Weights


@dataclasses.dataclass
class Context:
    """One per process, from `fleet.init` to its end."""

    role: Role
    group: Group
    strategy: DistributedStrategy
    models: list[ModelPlan] = dataclasses.field(default_factory=list)
    optimizers: list[OptimizerPlan] = dataclasses.field(default_factory=list)
    loaders: list[ShardLoader] = dataclasses.field(default_factory=list)
    #: what the batches of the loaders weigh
    weights: Weights | None = None
    #: how many reasons there are to keep gradients local for now
    holds: int = 0
    #: optimizer steps made so far
    step: int = 0


_context: Context | None = None


def current() -> Context:
    """The context; there is none before `fleet.init`."""
    if _context is None:
        raise ConfigError(
            "Fleetlight is not initialised; call fleet.init(is_collective=True) first"
        )
    return _context


def current_or_none() -> Context | None:
    """The context, or None before `fleet.init` and after the job has been left."""
    return _context


def set_current(context: Context | None) -> None:
    """Install the context of this process."""
    global _context
    _context = context
