# SPDX-License-Identifier: Apache-2.0
"""`distributed_model` and `distributed_optimizer`: they only record, in either order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import nn

from fleetlight.errors import PlanError, StrategyError, names_arguments
from fleetlight.fleet.context import Context, current
from fleetlight.fleet.moving import MovedForward
from fleetlight.fleet.registered import has_all_of
from fleetlight.fleet.tied_weights import refuse_tied
from fleetlight.observe.log import logger
from fleetlight.ps.layers.embedding import TableLayer
from fleetlight.ps.layers.handle import LeftBehind
from fleetlight.ps.layers.table_weight import give_name
from fleetlight.strategy import DistributedStrategy, differences

if TYPE_CHECKING:
    from fleetlight.fleet.minimizing import DistributedOptimizer

Module = TypeVar("Module", bound=nn.Module)


@names_arguments
def distributed_model(model: Module) -> Module:
    """Register the model whose workers train together; answers the same module."""
    context = current()
    if not isinstance(model, nn.Module):
        raise PlanError(f"distributed_model: got {_said(model)}, expected a torch.nn.Module")
    if any(model is plan.module and not plan.of_program for plan in context.models):
        raise PlanError("distributed_model was called twice with the same model")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise PlanError(
            f"distributed_model: got a {type(model).__name__}; pass the model inside it, "
            "Fleetlight takes its place"
        )
    context.refuse_late("distributed_model")
    _refuse_of_earlier_job(model)
    if _widen_of_program(context, model):
        return model
    refuse_shared_parameters(model, [plan.module for plan in context.models])
    if context.is_served or not context.group.alone:
        refuse_tied(model, served=context.is_served)
    for path, layer in model.named_modules():
        if isinstance(layer, TableLayer):
            give_name(layer.weight, layer.table or path or type(layer).__name__)
    context.models.append(context.plan_model(model))
    return model


def _widen_of_program(context: Context, model: nn.Module) -> bool:
    """A program may have registered the model, or a part of it, before the script does."""
    known = [plan for plan in context.models if plan.of_program and has_all_of(model, plan.module)]
    if len(known) != 1 or known[0].frozen:
        return False
    others = [plan.module for plan in context.models if plan is not known[0]]
    refuse_shared_parameters(model, others)
    known[0].widen(model)
    return True


def _refuse_of_earlier_job(model: nn.Module) -> None:
    """Rows that have moved to servers are gone with these; the rest of the model is not."""
    for path, layer in model.named_modules():
        moved = layer.__dict__.get("forward")
        handle = moved.handle if isinstance(moved, MovedForward) else None
        if isinstance(layer, TableLayer):
            handle = layer.handle
        elif isinstance(handle, LeftBehind):
            raise PlanError(f"distributed_model: {handle.refusal}")
        if handle is not None and handle.is_over:
            raise PlanError(
                f"distributed_model: the rows of {path or type(layer).__name__} were in a job that "
                "fleet.reset() has ended; build the model again (values of before: "
                "fleet.state_dict(model) before the reset, fleet.load_state_dict after it)"
            )


def _said(value: object) -> str:
    """What somebody gave us, in the words of an error."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return f"a {type(value).__name__}"


def refuse_shared_parameters(model: nn.Module, others: Iterable[nn.Module]) -> None:
    """A parameter belongs to one registered model."""
    known = {id(p) for module in others for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in known:
            raise PlanError(
                f"distributed_model: {name} is also a parameter of a model registered before; "
                "register the module that holds both instead"
            )


@names_arguments
def distributed_optimizer(
    optimizer: torch.optim.Optimizer, strategy: DistributedStrategy | None = None
) -> DistributedOptimizer:
    """Register the optimizer of the model; answers the same object, with `minimize(loss)`.

    A strategy given here takes the place of the one given to `fleet.init`, and of one given with
    another optimizer. Where they differ, a warning names the settings.
    """
    context = current()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(
            f"distributed_optimizer: got {_said(optimizer)}, expected a torch.optim.Optimizer"
        )
    if any(optimizer is plan.optimizer for plan in context.optimizers):
        raise PlanError("distributed_optimizer was called twice with the same optimizer")
    context.refuse_late("distributed_optimizer")
    if strategy is not None:
        _take_strategy(context, strategy)
    context.strategy.check()
    for sentence in context.strategy.inert():
        logger.warning("%s", sentence)
    context.optimizers.append(context.plan_optimizer(optimizer))
    return cast("DistributedOptimizer", optimizer)


def _take_strategy(context: Context, strategy: DistributedStrategy) -> None:
    if not isinstance(strategy, DistributedStrategy):
        raise StrategyError(
            f"distributed_optimizer: the strategy is {_said(strategy)}, expected a "
            "DistributedStrategy; of a dict one is made with DistributedStrategy(**settings)"
        )
    if strategy is context.strategy:
        return
    if strategy == context.strategy:
        # what the script sets later, it sets there
        context.strategy = strategy
        return
    if any(plan.frozen for plan in context.models):
        raise StrategyError(
            "distributed_optimizer(strategy=...) came after the first forward of the model, when "
            "the workers had agreed on another strategy; call it before"
        )
    if strategy.deadline_s != context.strategy.deadline_s and strategy.is_set("deadline_s"):
        logger.warning("strategy.deadline_s takes effect only when given to fleet.init")
    if strategy.checkpoint != context.strategy.checkpoint and strategy.is_set("checkpoint"):
        logger.warning("strategy.checkpoint takes effect only when given to fleet.init")
    if strategy.ssl_configs != context.strategy.ssl_configs and strategy.is_set("ssl_configs"):
        logger.warning("strategy.ssl_configs takes effect only when given to fleet.init")
    if strategy.seed != context.strategy.seed and context.loaders:
        logger.warning("strategy.seed takes effect only when given before fleet.shard")
    if context.strategy_from and (different := differences(context.strategy, strategy)):
        logger.warning(
            "distributed_optimizer: its strategy takes the place of the one given to %s, from "
            "which it differs: %s; give one strategy only",
            context.strategy_from,
            ", ".join(different),
        )
    context.strategy = strategy
    context.strategy_from = "fleet.distributed_optimizer before"
