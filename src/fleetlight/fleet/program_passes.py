# SPDX-License-Identifier: Apache-2.0
"""Which passes a strategy asks for, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fleetlight.collective.coded import coded_in
from fleetlight.collective.group import Group
from fleetlight.collective.replica import Reduction
from fleetlight.collective.routes.levels import Groups, levels_of
from fleetlight.collective.routes.routing import takes_levels
from fleetlight.errors import StrategyError
from fleetlight.fleet.context import Context
from fleetlight.fleet.model import reduction_of
from fleetlight.fleet.summing import may_train_alone
from fleetlight.static import passes
from fleetlight.static.running.options import RunOptions

if TYPE_CHECKING:
    from fleetlight.static.graph.form import Pass


def passes_of(context: Context, model: nn.Module) -> tuple[Pass, ...]:
    """What is done to a program of a job before it runs; `model` is the registered one."""
    if context.is_served:
        return (*_of_training(context), passes.SplitPS())
    return (*_of_training(context), *_of_reduction(context, model))


def options_of(context: Context) -> RunOptions:
    """How the programs of a job are run."""
    strategy = context.strategy
    threads = dict(strategy.execution_strategy.changed()).get("num_threads")
    return RunOptions(strategy.fetch_frequency, threads)


def _of_training(context: Context) -> Iterator[Pass]:
    strategy = context.strategy
    if strategy.recompute and strategy.recompute_configs.checkpoints:
        yield passes.Recompute(tuple(strategy.recompute_configs.checkpoints))
    if strategy.amp:
        configs = strategy.amp_configs
        if context.is_served and configs.dtype == "float16":
            raise StrategyError(
                "strategy.amp_configs.dtype: got 'float16', which needs a loss scale, and a "
                "program that trains with parameter servers has none; take 'bfloat16'"
            )
        yield passes.Amp(configs.dtype, configs.init_loss_scaling, configs.use_dynamic_loss_scaling)
    merges = strategy.gradient_merge and strategy.gradient_merge_configs.k_steps > 1
    # beside servers the live optimizer makes the steps, and merges
    if merges and not context.is_served:
        merge = strategy.gradient_merge_configs
        yield passes.GradientMerge(merge.k_steps, merge.avg)


def _of_reduction(context: Context, model: nn.Module) -> Iterator[Pass]:
    if context.group.alone:
        return
    strategy = context.strategy
    if strategy.sync_batch_norm:
        yield passes.SyncBatchNorm()
    group = context.dense_group
    assert group is not None
    reduction = reduction_of(context, model).within(group)
    levels = _levels(group, reduction)
    yield passes.InsertAllReduce()
    yield from _coded(model, reduction)
    if strategy.fuse_all_reduce_ops:
        yield passes.FuseAllReduce(reduction.limits)
    if levels and reduction.inner is not None:
        yield passes.Hierarchical(reduction.inner, levels, reduction.narrow)
    elif reduction.narrow is not None and not may_train_alone(context):
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
