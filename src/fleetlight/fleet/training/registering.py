# SPDX-License-Identifier: Apache-2.0
"""`distributed_model`, `distributed_optimizer` and `attach`: they only record, in any order."""

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
        """The type of a registered optimizer for type checkers: torch's own, with `minimize`.

        Python has no type for "the class of the argument, with one more method". With `Any` as a
        base, a variable of the optimizer's own class accepts it.
        """

        def minimize(
            self,
            loss: Tensor,
            *fleet: object,
            clip_norm: float | None = None,
            clip_value: float | None = None,
        ) -> None:
            """Run backward and step, or write them into the program of a static loss."""


Module = TypeVar("Module", bound=nn.Module)


@names_arguments
def distributed_model(model: Module) -> Module:
    """Register the model whose workers train together; returns the same module.

    Args:
        model: the module that contains all parameters to train. Its names do not change.

    Returns:
        The same object.

    Raises:
        PlanError: it is no module, is registered already, or shares parameters with another one.

    Example:
        >>> fleet.init(is_collective=True)
        >>> module = nn.Linear(2, 1)
        >>> model = fleet.distributed_model(module)
        >>> model is module
        True
    """
    register_model(current(), model)
    return model


def register_model(job: Job, model: nn.Module) -> None:
    """Register a model in a job."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"distributed_model: got {_kind_of(model)}, expected a torch.nn.Module")
    if any(model is managed.module and not managed.is_from_program for managed in job.models):
        raise PlanError("distributed_model was called twice with the same model")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        raise PlanError(
            f"distributed_model: got a {type(model).__name__}; pass the model inside it, since "
            "Fleetlight reduces the gradients itself"
        )
    job.check_not_late("distributed_model")
    _refuse_model_of_earlier_job(model)
    if _replace_program_model(job, model):
        return
    refuse_shared_parameters(model, [managed.module for managed in job.models])
    job.check_model(model)
    for path, layer in model.named_modules():
        if isinstance(layer, TableLayer):
            give_name(layer.weight, layer.table or path or type(layer).__name__)
    job.models.append(job.manage_model(model))


def _replace_program_model(job: Job, model: nn.Module) -> bool:
    """Let the script register a model of which a program has registered a part before."""
    known = [
        managed
        for managed in job.models
        if managed.is_from_program and has_all_of(model, managed.module)
    ]
    if len(known) != 1 or known[0].frozen:
        return False
    others = [managed.module for managed in job.models if managed is not known[0]]
    refuse_shared_parameters(model, others)
    known[0].replace_module(model)
    return True


def _refuse_model_of_earlier_job(model: nn.Module) -> None:
    """PlanError for a model whose rows were on the servers of an earlier job."""
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
                "fleet.reset() has ended; build the model again (to keep its values, call "
                "fleet.state_dict(model) before the reset and fleet.load_state_dict after it)"
            )


def _kind_of(value: object) -> str:
    """The kind of an argument, for an error."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return f"a {type(value).__name__}"


def refuse_shared_parameters(model: nn.Module, others: Iterable[nn.Module]) -> None:
    """PlanError for a parameter that is in two registered models."""
    known = {id(p) for module in others for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in known:
            raise PlanError(
                f"distributed_model: {name} is also a parameter of another registered model; "
                "register one module that contains both"
            )


@names_arguments
def distributed_optimizer(
    optimizer: torch.optim.Optimizer, strategy: DistributedStrategy | None = None
) -> DistributedOptimizer:
    """Register the optimizer of the model; returns the same object, with `minimize(loss)`.

    A strategy given here replaces the one given to `fleet.init` or with another optimizer. Where
    they differ, a warning names the settings.

    Args:
        optimizer: any optimizer of `torch.optim` or `fleet.optim`.
        strategy: the settings of the job.

    Returns:
        The same object.

    Raises:
        PlanError: it is no optimizer, or is registered already.
        StrategyError: two settings exclude each other, or the job cannot do what they ask for.

    Example:
        >>> fleet.init(is_collective=True)
        >>> model = fleet.distributed_model(nn.Linear(2, 1))
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> optimizer = fleet.distributed_optimizer(optimizer)
        >>> optimizer.minimize(model(torch.ones(1, 2)).sum())
    """
    job = current()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(
            f"distributed_optimizer: got {_kind_of(optimizer)}, expected a torch.optim.Optimizer"
        )
    if any(optimizer is managed.optimizer for managed in job.optimizers):
        raise PlanError("distributed_optimizer was called twice with the same optimizer")
    job.check_not_late("distributed_optimizer")
    if strategy is not None:
        _take_strategy(job, strategy)
    job.strategy.check()
    for sentence in job.strategy.inert():
        logger.warning("%s", sentence)
    job.optimizers.append(job.manage_optimizer(optimizer))
    return cast("DistributedOptimizer", optimizer)


def _take_strategy(job: Job, strategy: DistributedStrategy) -> None:
    if not isinstance(strategy, DistributedStrategy):
        raise StrategyError(
            f"distributed_optimizer: the strategy is {_kind_of(strategy)}, expected a "
            "DistributedStrategy; make one from a dict with DistributedStrategy(**settings)"
        )
    if strategy is job.strategy:
        return
    if strategy == job.strategy:
        # the script may set fields of this object later
        job.strategy = strategy
        return
    if any(managed.frozen for managed in job.models):
        raise StrategyError(
            "distributed_optimizer(strategy=...) was called after the first forward of the model, "
            "when the workers had agreed on another strategy; call it before the first forward"
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
            "distributed_optimizer: its strategy replaces the one given to %s, from which it "
            "differs: %s; give one strategy only",
            job.strategy_from,
            ", ".join(different),
        )
    job.strategy = strategy
    job.strategy_from = "an earlier fleet.distributed_optimizer"
    if job.strategy_changes is not None:
        job.strategy_changes()


@names_arguments
def attach(
    *, scheduler: LRScheduler | None = None, scaler: torch.amp.GradScaler | None = None
) -> None:
    """Save and resume a learning-rate scheduler or a loss scaler with the job.

    Torch's optimizers have no reference to them. Call it once for each, after making it and before
    the first batch. With parameter servers every scaler must be attached: all workers lower its
    scale when one of them finds an infinity.

    Args:
        scheduler: a scheduler of `torch.optim.lr_scheduler`.
        scaler: a `torch.amp.GradScaler`.

    Raises:
        PlanError: neither is given, or an argument has another type.

    Example:
        >>> fleet.init(is_collective=True)
        >>> optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
        >>> scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
        >>> fleet.attach(scheduler=scheduler)
    """
    job = current()
    for name, value, kind in (
        ("scheduler", scheduler, LRScheduler),
        ("scaler", scaler, torch.amp.GradScaler),
    ):
        if value is not None and not isinstance(value, kind):
            raise PlanError(
                f"fleet.attach: got {_kind_of(value)} as {name}, expected a {kind.__module__}."
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
    """The registered model; several models become one, with their numbers as prefixes."""
    if not job.models:
        raise PlanError("no model is registered; call model = fleet.distributed_model(model) first")
    modules = [managed.module for managed in job.models]
    return modules[0] if len(modules) == 1 else nn.ModuleList(modules)


def has_all_of(module: nn.Module, other: nn.Module) -> bool:
    """True when a module is another one, or has all of its parameters."""
    mine = {id(parameter) for parameter in module.parameters()}
    return module is other or all(id(parameter) in mine for parameter in other.parameters())


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """The name of each parameter."""
    return {parameter: name for name, parameter in model.named_parameters()}
