# SPDX-License-Identifier: Apache-2.0
"""`distributed_model` and `distributed_optimizer`: they only record, in either order.

What is registered is seen as one model with names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from fleetlight.errors import PlanError, StrategyError, names_arguments
from fleetlight.fleet.job import Job, current
from fleetlight.fleet.plan.remote_embedding import RemoteEmbedding
from fleetlight.observe.log import logger
from fleetlight.ps.layers.embedding import TableLayer
from fleetlight.ps.layers.handle import LeftBehind
from fleetlight.ps.layers.table_weight import give_name
from fleetlight.strategy import DistributedStrategy, differences

if TYPE_CHECKING:

    class DistributedOptimizer(torch.optim.Optimizer, Any):  # type: ignore[misc]
        """What type checkers see of a registered optimizer: torch's own, with `minimize`.

        Python's types have no word for "the class that came in, with a method more". Of a base
        that may be anything, it fits a variable of the optimizer's own class.
        """

        def minimize(
            self,
            loss: Tensor,
            *fleet: object,
            clip_norm: float | None = None,
            clip_value: float | None = None,
        ) -> None:
            """Backward and step; of a static program's loss, they are written into the program."""


Module = TypeVar("Module", bound=nn.Module)


@names_arguments
def distributed_model(model: Module) -> Module:
    """Register the model whose workers train together; returns the same module."""
    register_model(current(), model)
    return model


def register_model(job: Job, model: nn.Module) -> None:
    """What `distributed_model` does, in a job."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"distributed_model: got {_said(model)}, expected a torch.nn.Module")
    if any(model is plan.module and not plan.of_program for plan in job.models):
        raise PlanError("distributed_model was called twice with the same model")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise PlanError(
            f"distributed_model: got a {type(model).__name__}; pass the model inside it, "
            "Fleetlight takes its place"
        )
    job.refuse_late("distributed_model")
    _refuse_of_earlier_job(model)
    if _widen_of_program(job, model):
        return
    refuse_shared_parameters(model, [plan.module for plan in job.models])
    job.check_model(model)
    for path, layer in model.named_modules():
        if isinstance(layer, TableLayer):
            give_name(layer.weight, layer.table or path or type(layer).__name__)
    job.models.append(job.plan_model(model))


def _widen_of_program(job: Job, model: nn.Module) -> bool:
    """A program may have registered the model, or a part of it, before the script does."""
    known = [plan for plan in job.models if plan.of_program and has_all_of(model, plan.module)]
    if len(known) != 1 or known[0].frozen:
        return False
    others = [plan.module for plan in job.models if plan is not known[0]]
    refuse_shared_parameters(model, others)
    known[0].widen(model)
    return True


def _refuse_of_earlier_job(model: nn.Module) -> None:
    """Rows that have moved to servers are gone with these; the rest of the model is not."""
    for path, layer in model.named_modules():
        moved = layer.__dict__.get("forward")
        handle = moved.handle if isinstance(moved, RemoteEmbedding) else None
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
    job = current()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(
            f"distributed_optimizer: got {_said(optimizer)}, expected a torch.optim.Optimizer"
        )
    if any(optimizer is plan.optimizer for plan in job.optimizers):
        raise PlanError("distributed_optimizer was called twice with the same optimizer")
    job.refuse_late("distributed_optimizer")
    if strategy is not None:
        _take_strategy(job, strategy)
    job.strategy.check()
    for sentence in job.strategy.inert():
        logger.warning("%s", sentence)
    job.optimizers.append(job.plan_optimizer(optimizer))
    return cast("DistributedOptimizer", optimizer)


def _take_strategy(job: Job, strategy: DistributedStrategy) -> None:
    if not isinstance(strategy, DistributedStrategy):
        raise StrategyError(
            f"distributed_optimizer: the strategy is {_said(strategy)}, expected a "
            "DistributedStrategy; of a dict one is made with DistributedStrategy(**settings)"
        )
    if strategy is job.strategy:
        return
    if strategy == job.strategy:
        # what the script sets later, it sets there
        job.strategy = strategy
        return
    if any(plan.frozen for plan in job.models):
        raise StrategyError(
            "distributed_optimizer(strategy=...) came after the first forward of the model, when "
            "the workers had agreed on another strategy; call it before"
        )
    if strategy.deadline_s != job.strategy.deadline_s and strategy.is_set("deadline_s"):
        logger.warning("strategy.deadline_s takes effect only when given to fleet.init")
    if strategy.checkpoint != job.strategy.checkpoint and strategy.is_set("checkpoint"):
        logger.warning("strategy.checkpoint takes effect only when given to fleet.init")
    if strategy.ssl_configs != job.strategy.ssl_configs and strategy.is_set("ssl_configs"):
        logger.warning("strategy.ssl_configs takes effect only when given to fleet.init")
    if strategy.seed != job.strategy.seed and job.loaders:
        logger.warning("strategy.seed takes effect only when given before fleet.shard")
    if job.strategy_from and (different := differences(job.strategy, strategy)):
        logger.warning(
            "distributed_optimizer: its strategy takes the place of the one given to %s, from "
            "which it differs: %s; give one strategy only",
            job.strategy_from,
            ", ".join(different),
        )
    job.strategy = strategy
    job.strategy_from = "fleet.distributed_optimizer before"


@names_arguments
def attach(
    *, scheduler: LRScheduler | None = None, scaler: torch.amp.GradScaler | None = None
) -> None:
    """Let a job that saves and resumes by itself do so with a scheduler and a loss scaler.

    Torch's optimizers know neither. Call it once for each, after making it and before the first
    batch. With parameter servers a scaler must be attached: its scale is lowered on all workers
    when one of them finds an infinity.
    """
    job = current()
    for name, value, kind in (
        ("scheduler", scheduler, LRScheduler),
        ("scaler", scaler, torch.amp.GradScaler),
    ):
        if value is not None and not isinstance(value, kind):
            raise PlanError(
                f"fleet.attach: got {_said(value)} as {name}, expected a {kind.__module__}."
                f"{kind.__name__}"
            )
    if scheduler is None and scaler is None:
        raise PlanError(
            "fleet.attach: got nothing, expected scheduler=... or scaler=..., such as "
            "fleet.attach(scheduler=scheduler)"
        )
    if scheduler is not None:
        job.schedulers.attach(scheduler)
    if scaler is not None and not any(scaler is one for one in job.scalers):
        job.scalers.append(scaler)


def registered_model(job: Job) -> nn.Module:
    """The registered model; several become one, their names starting with their number."""
    if not job.models:
        raise PlanError("no model is registered; add model = fleet.distributed_model(model) before")
    modules = [plan.module for plan in job.models]
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules)


def has_all_of(module: nn.Module, other: nn.Module) -> bool:
    """Whether a registered model is another one, or has all of its parameters."""
    mine = {id(parameter) for parameter in module.parameters()}
    return module is other or all(id(parameter) in mine for parameter in other.parameters())


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """What each parameter is called."""
    return {parameter: name for name, parameter in model.named_parameters()}
