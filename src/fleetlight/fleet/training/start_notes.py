# SPDX-License-Identifier: Apache-2.0
"""What is said once when training starts, of what would else be noticed late or never."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from fleetlight.fleet.context import Context
from fleetlight.fleet.plan.bound_plan import mode_of
from fleetlight.fleet.training.local_training import chosen
from fleetlight.observe.log import logger
from fleetlight.ps.plan import GEO
from fleetlight.strategy import current_job
from fleetlight.torch_compat.modules import BatchNorm

#: how many names a line lists
_NAMED = 3


def tell_start(module: nn.Module, context: Context) -> None:
    """Say it on worker 0, where the model is alike on all of them."""
    if context.group.index == 0:
        for line in _warnings(module, context):
            logger.warning("%s", line)


def _warnings(module: nn.Module, context: Context) -> Iterator[str]:
    optimizers = [plan.optimizer for plan in context.optimizers]
    if idle := untrained(module, optimizers):
        yield (
            f"{listed(idle)}: in no optimizer given to fleet.distributed_optimizer, so nothing "
            "trains them; add them to one, or give them requires_grad_(False)"
        )
    strategy = context.strategy
    is_geo = context.is_served and mode_of(strategy) == GEO and context.group.size > 1
    for optimizer in optimizers if is_geo else ():
        if _keeps_state(optimizer) and _has_dense(optimizer):
            yield (
                f"GeoSGD: dense parameters learn by {type(optimizer).__name__}, whose state each "
                "worker keeps for itself; its quality is known for plain SGD only"
            )


def untrained(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Parameters that want a gradient and that no optimizer steps; none where there is none."""
    stepped = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    if not optimizers:
        return []
    return [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in stepped]


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown


def _keeps_state(optimizer: torch.optim.Optimizer) -> bool:
    if not isinstance(optimizer, torch.optim.SGD):
        return True
    return any(group["momentum"] for group in optimizer.param_groups)


def _has_dense(optimizer: torch.optim.Optimizer) -> bool:
    # the weight of a table has no elements
    return any(p.numel() for group in optimizer.param_groups for p in group["params"])


def tell_of_batch_norm(module: nn.Module, context: Context) -> None:
    """Whether batch norm sees the worker's own batch only, where that can be changed.

    Worker 0 says so, once the layers are in the mode that they train in.
    """
    strategy, job = context.strategy, current_job()
    if context.group.index:
        return
    sums = job.is_collective or strategy.a_sync_configs.dense == "allreduce"
    if context.group.alone or not sums or strategy.sync_batch_norm or chosen(strategy):
        return
    norms = [m for m in module.modules() if isinstance(m, BatchNorm) and m.training]
    local = [m for m in norms if not isinstance(m, nn.SyncBatchNorm)]
    if local:
        logger.info(
            "batch norm: %d layers normalise by the batch of their own worker; "
            "strategy.sync_batch_norm = True takes the batches of all workers",
            len(local),
        )
