# SPDX-License-Identifier: Apache-2.0
"""`clip_grad_norm_`: one global norm over all gradients, wherever they are."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from fleetlight.fleet.job import current
from fleetlight.fleet.training.dgc import clipping_error, uses_dgc


def clip_grad_norm_(
    model: nn.Module | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`; answers the norm.

    Call it between backward and step; the gradients of all workers are the same by then, where
    they do not train alone. Of gradients still being merged, it only answers the norm.
    """
    job = current()
    if uses_dgc(job):
        raise clipping_error("fleet.clip_grad_norm_")
    merges = [plan.merge for plan in job.optimizers if plan.merge is not None]
    if any(merge.is_between() for merge in merges):
        max_norm = float("inf")
    for merge in merges:
        merge.complete()
    parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
    for plan in job.models:
        if plan.replica is not None and not plan.trains_alone:
            used = plan.stepped if plan.has_any_of(parameters) else -1
            plan.replica.ensure_reduced(expected=bool(job.no_sync_depth), used=used)
    return job.clip(parameters, max_norm, norm_type)
