# SPDX-License-Identifier: Apache-2.0
"""Warnings and notes at the start of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from fleetlight.errors import first_names
from fleetlight.fleet.job import Job
from fleetlight.fleet.training.local_training import chosen
from fleetlight.observe.log import logger
from fleetlight.strategy import current_job
from fleetlight.torch_compat.modules import BatchNorm

#: the number of names in a line
_NAMED = 3


def warn_at_start(module: nn.Module, job: Job) -> None:
    """Warn on worker 0; the model is equal on all workers."""
    if job.group.index == 0:
        for line in _warnings(module, job):
            logger.warning("%s", line)


def _warnings(module: nn.Module, job: Job) -> Iterator[str]:
    optimizers = [managed.optimizer for managed in job.optimizers]
    if idle := untrained(module, optimizers):
        yield (
            f"{first_names(idle, _NAMED)}: in no optimizer given to fleet.distributed_optimizer, "
            "so no step trains them; add them to one, or call requires_grad_(False) on them"
        )


def untrained(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[str]:
    """Parameters that require a gradient but are in no optimizer; none without optimizers."""
    stepped = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    if not optimizers:
        return []
    return [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in stepped]


def report_batch_norm(module: nn.Module, job: Job) -> None:
    """Note on worker 0 that batch norm uses each worker's own batch, where a setting changes that.

    Called at the first training forward, when the layers are in training mode.
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
            "batch norm: %d layers use the statistics of their own worker's batch; "
            "strategy.sync_batch_norm = True uses the batches of all workers",
            len(local),
        )
