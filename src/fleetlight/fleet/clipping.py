# SPDX-License-Identifier: Apache-2.0
"""`clip_grad_norm_`: one global norm over all gradients, wherever they are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fleetlight.errors import PlanError
from fleetlight.fleet.context import Context, current
from fleetlight.fleet.dgc import clipping_error, uses_dgc
from fleetlight.fleet.served import ServedOptimizer
from fleetlight.ps.worker.communicator.base import norm_of


def clip_grad_norm_(
    model: nn.Module | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients so that their global norm is at most `max_norm`; answers the norm.

    Call it between backward and step; the gradients of all workers are the same by then, where
    they do not train alone. Of gradients still being merged, it only answers the norm.
    """
    context = current()
    if uses_dgc(context):
        raise clipping_error("fleet.clip_grad_norm_")
    merges = [plan.merge for plan in context.optimizers if plan.merge is not None]
    if any(merge.is_between() for merge in merges):
        max_norm = float("inf")
    for merge in merges:
        merge.complete()
    parameters = list(model.parameters() if isinstance(model, nn.Module) else model)
    for plan in context.models:
        if plan.replica is not None and not plan.trains_alone:
            used = plan.stepped if plan.has_any_of(parameters) else -1
            plan.replica.ensure_reduced(expected=bool(context.holds), used=used)
    if context.session is not None:
        return _clip_served(context, parameters, max_norm, norm_type)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def _clip_served(
    context: Context, parameters: list[Tensor], max_norm: float, norm_type: float
) -> Tensor:
    """In sync mode only the servers know the gradients of all workers together."""
    assert context.session is not None
    for model in context.models:
        model.freeze()
    plans = _owners(context, {id(parameter) for parameter in parameters})
    updates = [plan.update() for plan in plans]
    if any(plan.merge is not None and plan.merge.is_between() for plan in plans):
        return torch.tensor(norm_of(updates, norm_type))
    norm = context.session.clip(updates, max_norm, norm_type)
    for plan in plans:
        plan.norm = norm
    return torch.tensor(norm)


def _owners(context: Context, wanted: set[int]) -> list[ServedOptimizer]:
    """The optimizers that step those parameters; each is clipped as a whole."""
    owners = []
    for plan in context.optimizers:
        assert isinstance(plan, ServedOptimizer)
        mine = {id(p) for group in plan.optimizer.param_groups for p in group["params"]}
        if mine & wanted:
            owners.append(plan)
        if mine & wanted and mine - wanted:
            raise PlanError(
                "clip_grad_norm_: got some of the parameters of an optimizer; with parameter "
                "servers the gradients of an optimizer are clipped together, give all of them"
            )
    return owners
