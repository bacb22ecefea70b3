# SPDX-License-Identifier: Apache-2.0
"""`clip_grad_norm_`: one global norm over all gradients, wherever they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fleetlight.fleet.context import Context, current
from fleetlight.fleet.served import ServedOptimizer


def clip_grad_norm_(
    model: nn.Module | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`; answers the norm.

    Call it between backward and step; the gradients of all workers are the same by then. Of
    gradients still being merged, it only answers the norm.
    """
    context = current()
    merges = [plan.merge for plan in context.optimizers if plan.merge is not None]
    if any(merge.is_between() for merge in merges):
        max_norm = float("inf")
    for merge in merges:
        merge.complete()
    for plan in context.models:
        if plan.replica is not None:
            plan.replica.ensure_reduced(expected=bool(context.holds))
    if context.session is not None:
        return _clip_served(context, max_norm, norm_type)
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def _clip_served(context: Context, max_norm: float, norm_type: float) -> Tensor:
    """All that is registered is clipped as one: what of it is whose only the servers know."""
    assert context.session is not None
    plans = [plan for plan in context.optimizers if isinstance(plan, ServedOptimizer)]
    for plan in context.models:
        plan.freeze()
    updates = [plan.update() for plan in plans]
    return torch.tensor(context.session.clip(updates, max_norm, norm_type))
