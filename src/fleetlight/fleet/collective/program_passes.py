# SPDX-License-Identifier: Apache-2.0
"""Which passes the strategy of a collective job asks for, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from fleetlight.collective.coded import coded_in
from fleetlight.collective.group import Group
from fleetlight.collective.replica import Reduction
from fleetlight.collective.routes.levels import Groups, levels_of
from fleetlight.collective.routes.routing import takes_levels
from fleetlight.fleet.job import Job
from fleetlight.fleet.training.local_training import may_train_alone
from fleetlight.fleet.training.model import reduction_of
from fleetlight.fleet.training.programs import passes_of_training
from fleetlight.static import passes
from fleetlight.static.graph.form import Pass


def passes_of(job: Job, model: nn.Module) -> tuple[Pass, ...]:
    """What is done to a program of a job before it runs; `model` is the registered one."""
    return (
        *passes_of_training(job),
        *_merging(job),
        *_of_reduction(job, model),
    )


def _merging(job: Job) -> Iterator[Pass]:
    merge = job.strategy.gradient_merge_configs
    if job.strategy.gradient_merge and merge.k_steps > 1:
        yield passes.GradientMerge(merge.k_steps, merge.avg)


def _of_reduction(job: Job, model: nn.Module) -> Iterator[Pass]:
    if job.group.alone:
        return
    strategy = job.strategy
    if strategy.sync_batch_norm:
        yield passes.SyncBatchNorm()
    group = job.dense_group
    assert group is not None
    reduction = reduction_of(job, model).within(group)
    levels = _levels(group, reduction)
    yield passes.InsertAllReduce()
    yield from _coded(model, reduction)
    if strategy.fuse_all_reduce_ops:
        yield passes.FuseAllReduce(reduction.limits)
    if levels and reduction.inner is not None:
        yield passes.Hierarchical(reduction.inner, levels, reduction.narrow)
    elif reduction.narrow is not None and not may_train_alone(job):
        # a pass would also round the gradients of workers that train alone
        yield passes.Narrow(reduction.narrow)
    yield passes.Overlap()


def _levels(group: Group, reduction: Reduction) -> tuple[Groups, ...]:
    """Where workers share hosts; elsewhere all of them sum at once."""
    levels = [] if reduction.inner is None else levels_of(group.hellos, reduction.inner)
    taken = takes_levels(group, levels, coded=reduction.compression is not None)
    return tuple(levels) if taken else ()


def _coded(model: nn.Module, reduction: Reduction) -> Iterator[Pass]:
    compression = reduction.compression
    if compression is None:
        return
    compression.check(name for name, _ in model.named_parameters())
    coded: set[Tensor] = set(coded_in(model, compression).values())
    yield passes.Compress(compression.codec.name, coded.__contains__, compression.message_bytes)
