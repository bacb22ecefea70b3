# SPDX-License-Identifier: Apache-2.0
"""`distributed_optimizer`: the same torch optimizer, whose steps the workers make together."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from fleetlight.errors import PlanError, StrategyError
from fleetlight.fleet.context import Context, current
from fleetlight.fleet.model import ModelPlan
from fleetlight.observe.log import logger
from fleetlight.strategy import DistributedStrategy

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def distributed_optimizer(
    optimizer: Optimizer, strategy: DistributedStrategy | None = None
) -> Optimizer:
    """Register the optimizer of the model; answers the same object, with `minimize(loss)`.

    A strategy given here takes the place of the one given to `fleet.init`.
    """
    context = current()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PlanError(
            f"distributed_optimizer: got a {type(optimizer).__name__}, "
            "expected a torch.optim.Optimizer"
        )
    if any(optimizer is plan.optimizer for plan in context.optimizers):
        raise PlanError("distributed_optimizer was called twice with the same optimizer")
    if strategy is not None:
        _take_strategy(context, strategy)
    for sentence in context.strategy.inert():
        logger.warning("%s", sentence)
    context.optimizers.append(OptimizerPlan(optimizer, context))
    return optimizer


def clip_grad_norm_(
    model: torch.nn.Module | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
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
        merge.average()
    for plan in context.models:
        if plan.replica is not None:
            plan.replica.ensure_reduced(expected=bool(context.holds))
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else model
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def _take_strategy(context: Context, strategy: DistributedStrategy) -> None:
    if strategy is context.strategy:
        return
    if any(plan.frozen for plan in context.models):
        raise StrategyError(
            "distributed_optimizer(strategy=...) came after the first forward of the model, when "
            "the workers had agreed on another strategy; call it before"
        )
    if strategy.deadline_s != context.strategy.deadline_s and strategy.said("deadline_s"):
        logger.warning("strategy.deadline_s takes effect only when given to fleet.init")
    if strategy.seed != context.strategy.seed and context.loaders:
        logger.warning("strategy.seed takes effect only when given before fleet.shard")
    context.strategy = strategy


class OptimizerPlan:
    """A registered optimizer: sees to it that its steps use reduced gradients.

    `step` and `zero_grad` are replaced on the object, as torch's schedulers do, only where
    several backwards make one step; else hooks suffice.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, context: Context) -> None:
        self.optimizer = optimizer
        self._context = context
        self._scaler: torch.amp.GradScaler | None = None
        self._known: set[int] | None = None
        self.merge: GradientMerge | None = None
        self._models: list[ModelPlan] = []
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        optimizer.minimize = self._minimize  # type: ignore[attr-defined]
        strategy = context.strategy
        if strategy.gradient_merge and strategy.gradient_merge_configs.k_steps > 1:
            self.merge = GradientMerge(optimizer, context)

    def scaler_state(self) -> dict[str, Any] | None:
        """The state of the loss scaler that `minimize` uses, if it uses one."""
        return None if self._scaler is None else self._scaler.state_dict()

    def load_scaler_state(self, state: dict[str, Any] | None) -> None:
        """Take up the loss scale where it was."""
        scaler = self._scaler_or_none()
        if scaler is not None and state:
            scaler.load_state_dict(state)

    def _minimize(self, loss: Tensor, *_: Any) -> None:
        """Backward and step, in Fleet's word; `zero_grad` remains the caller's."""
        scaler = self._scaler_or_none()
        if scaler is None:
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            return
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.merge is not None and self.merge.is_between():
            self.optimizer.step()  # counts; the scaler's turn is at the last backward of k
            return
        with self._unscaling():
            scaler.step(self.optimizer)
        scaler.update()

    @contextlib.contextmanager
    def _unscaling(self) -> Iterator[None]:
        """The scaler of `minimize` works on the merged gradients, not on each part."""
        if self.merge is not None:
            self.merge.takes_scaler = True
        yield

    def _scaler_or_none(self) -> torch.amp.GradScaler | None:
        """Float16 needs its loss scaled; bfloat16 has the range of float32."""
        strategy = self._context.strategy
        if not strategy.amp or strategy.amp_configs.dtype != "float16":
            return None
        if self._scaler is None:
            configs = strategy.amp_configs
            self._scaler = torch.amp.GradScaler(
                self._context.group.device.type,
                init_scale=configs.init_loss_scaling,
                growth_interval=2000 if configs.use_dynamic_loss_scaling else 1 << 30,
            )
        return self._scaler

    def _before_step(self, _: Any, args: Any, kwargs: Any) -> Any:
        for plan in self._context.models:
            plan.freeze()  # also when its own forward was never called
        trainable = self._trainable()
        if trainable != self._known:
            self._know(trainable)
        for plan in self._models:
            if plan.replica is not None:
                plan.replica.ensure_reduced(expected=self.merge is not None)
        return self._with_common_loss(args, kwargs)

    def _trainable(self) -> set[int]:
        return {
            id(p)
            for group in self.optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        }

    def _know(self, trainable: set[int]) -> None:
        """Find the models it steps; those whose parameters have changed agree anew."""
        if self._known is not None:
            for plan in self._models:
                plan.replicate_again()
        self._known = trainable
        self._check_parameters(trainable)

    def _with_common_loss(self, args: Any, kwargs: Any) -> Any:
        """Optimizers that decide by the loss of a closure must see the same loss everywhere."""
        group = self._context.group
        # torch hands its hooks the optimizer itself as the first of the arguments
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or group.alone:
            return None

        def common() -> Any:
            loss = closure()
            if not isinstance(loss, Tensor):
                return loss
            return group.all_reduce(loss.detach().clone()) / group.size

        return (args[0], common), {k: v for k, v in kwargs.items() if k != "closure"}

    def _after_step(self, *_: Any) -> None:
        context = self._context
        context.step += 1
        if context.group.liveness is not None:
            context.group.liveness.step = context.step

    def _check_parameters(self, mine: set[int]) -> None:
        """A parameter outside every registered model would drift apart on the workers."""
        known: set[int] = set()
        self._models = []
        for plan in self._context.models:
            ids = {id(p) for p in plan.module.parameters()}
            known |= ids
            if ids & mine:
                self._models.append(plan)
        strangers = 0 if self._context.group.alone else len(mine - known)
        if strangers:
            raise PlanError(
                f"{strangers} parameters of the optimizer belong to no distributed model, so they "
                "would differ between workers; add model = fleet.distributed_model(model) for each "
                "model they come from"
            )


class GradientMerge:
    """Lets k backwards add up before one step; only the last of them communicates."""

    def __init__(self, optimizer: torch.optim.Optimizer, context: Context) -> None:
        configs = context.strategy.gradient_merge_configs
        self._optimizer = optimizer
        self._context = context
        self._k = configs.k_steps
        self._average = configs.avg
        self._done = 0
        self._held = False
        self._is_averaged = False
        #: True when the loss scaler of `minimize` is the one that calls
        self.takes_scaler = False
        self._zero_grad = optimizer.zero_grad
        optimizer.step = self._wrap_step(optimizer.step)  # type: ignore[method-assign]
        optimizer.zero_grad = self._merged_zero_grad  # type: ignore[method-assign]
        self._hold()

    def _wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def merged_step(*args: Any, **kwargs: Any) -> Any:
            self._refuse(args, kwargs)
            self._done += 1
            self._hold()
            if self._done < self._k:
                return None
            self.average()
            result = step(*args, **kwargs)
            self._done = 0
            self._is_averaged = False
            self._hold()
            return result

        return merged_step

    def _refuse(self, args: Any, kwargs: Any) -> None:
        if args or kwargs:
            raise PlanError(
                "gradient_merge: step was called with a closure, which makes its own backwards; "
                "use one of the two"
            )
        if not self.takes_scaler and _inside_scaler():
            raise PlanError(
                "gradient_merge: a GradScaler would unscale each part of the gradient again; "
                "use strategy.amp and optimizer.minimize(loss), or fleet.no_sync()"
            )

    def is_between(self) -> bool:
        """True when the backward just made is not the last of its k."""
        return self._done < self._k - 1

    def average(self) -> None:
        """Divide the merged gradients by k; once, and only behind the last backward."""
        if self._average and not self._is_averaged and self._done >= self._k - 1:
            self._is_averaged = True
            self._scale_gradients()

    def _merged_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._done == 0:
            self._zero_grad(*args, **kwargs)

    def _hold(self) -> None:
        """Hold gradients back unless the coming backward is the last of its k."""
        hold = self._done < self._k - 1
        if hold != self._held:
            self._held = hold
            self._context.holds += 1 if hold else -1

    def _scale_gradients(self) -> None:
        grads = [p.grad for g in self._optimizer.param_groups for p in g["params"]]
        dense = [grad for grad in grads if grad is not None]
        if dense:
            torch._foreach_mul_(dense, 1.0 / self._k)


def _inside_scaler() -> bool:
    """True when a GradScaler is among the callers."""
    frame = sys._getframe(2)
    for _ in range(4):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_name == "_maybe_opt_step":
            return True
    return False
