# SPDX-License-Identifier: Apache-2.0
"""What is said once when training starts, of what would else be noticed late or never."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from fleetlight.fleet.job import Job
from fleetlight.fleet.training.local_training import chosen
from fleetlight.observe.log import logger
from fleetlight.strategy import current_job
from fleetlight.torch_compat.modules import BatchNorm

#: how many names a line lists
_NAMED = 3


def tell_start(module: nn.Module, job: Job) -> None:
    """Say it on worker 0, where the model is alike on all of them."""
    if job.group.index == 0:
        for line in _warnings(module, job):
            logger.warning("%s", line)


def _warnings(module: nn.Module, job: Job) -> Iterator[str]:
    optimizers = [plan.optimizer for plan in job.optimizers]
    if idle := untrained(module, optimizers):
        yield (
            f"{listed(idle)}: in no optimizer given to fleet.distributed_optimizer, so nothing "
            "trains them; add them to one, or give them requires_grad_(False)"
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


def tell_of_batch_norm(module: nn.Module, job: Job) -> None:
    """Whether batch norm sees the worker's own batch only, where that can be changed.

    Worker 0 says so, once the layers are in the mode that they train in.
    """
    strategy, facts = job.strategy, current_job()
    if job.group.index:
        return
    sums = facts.is_collective or strategy.a_sync_configs.dense == "allreduce"
    if job.group.alone or not sums or strategy.sync_batch_norm or chosen(strategy):
        return
    norms = [m for m in module.modules() if isinstance(m, BatchNorm) and m.training]
    local = [m for m in norms if not isinstance(m, nn.SyncBatchNorm)]
    if local:
        logger.info(
            "batch norm: %d layers normalise by the batch of their own worker; "
            "strategy.sync_batch_norm = True takes the batches of all workers",
            len(local),
        )
