# SPDX-License-Identifier: Apache-2.0
"""What a script has registered, seen as one model with names."""

from __future__ import annotations

from torch import nn

from fleetlight.errors import PlanError, RoleError
from fleetlight.fleet.context import Context


def registered_model(context: Context) -> nn.Module:
    """The registered model; several become one, their names starting with their number."""
    if not context.models:
        raise PlanError("no model is registered; add model = fleet.distributed_model(model) before")
    modules = [plan.module for plan in context.models]
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules)


def has_all_of(module: nn.Module, other: nn.Module) -> bool:
    """Whether a registered model is another one, or has all of its parameters."""
    mine = {id(parameter) for parameter in module.parameters()}
    return module is other or all(id(parameter) in mine for parameter in other.parameters())


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """What each parameter is called."""
    return {parameter: name for name, parameter in model.named_parameters()}


def refuse_in_server(context: Context, name: str) -> None:
    """Raise in a parameter server for what workers do."""
    if context.service is not None:
        raise RoleError(
            f"fleet.{name} was called in a parameter server; call it only where fleet.is_worker() "
            "is true"
        )
