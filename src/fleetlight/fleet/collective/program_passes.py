# SPDX-License-Identifier: Apache-2.0
"""The passes over a program that the strategy of a collective job asks for, in order."""

from __future__ import annotations

from torch import nn

from fleetlight.collective.data_parallel.replica import Reduction
from fleetlight.collective.group import Group
from fleetlight.collective.routes.levels import Groups, levels_of
from fleetlight.collective.routes.routing import takes_levels
from fleetlight.fleet.job import Job
from fleetlight.fleet.training.local_training import may_train_locally
from fleetlight.fleet.training.model import reduction_of
from fleetlight.static import passes
from fleetlight.static.graph.form import Pass


def passes_of(job: Job, model: nn.Module) -> tuple[Pass, ...]:
    """The passes over a program before it runs; `model` is the registered one."""
    reduction: Reduction | None = None
    levels: tuple[Groups, ...] = ()
    group = job.dense_group
    if group is not None and not group.alone:
        reduction = reduction_of(job, model).within(group)
        levels = _levels(group, reduction)
    request = passes.PassRequest(
        strategy=job.strategy,
        model=model,
        reduction=reduction,
        levels=levels,
        trains_alone=may_train_locally(job),
    )
    return passes.chosen(request)


def _levels(group: Group, reduction: Reduction) -> tuple[Groups, ...]:
    """The levels of a hierarchical sum; none where all workers sum at once."""
    levels = [] if reduction.inner is None else levels_of(group.hellos, reduction.inner)
    taken = takes_levels(group, levels, coded=reduction.compression is not None)
    return tuple(levels) if taken else ()
