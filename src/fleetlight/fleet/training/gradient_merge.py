# SPDX-License-Identifier: Apache-2.0
"""`strategy.gradient_merge`: k backwards make one optimizer step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fleetlight.errors import PlanError
from fleetlight.fleet.job import Job
from fleetlight.fleet.parts.loss import scaler_at_work
from fleetlight.torch_compat.optimizers import count_as_stepped


class MergedGradients:
    """Turns k steps into one.

    Each step moves the gradients into a sum that `zero_grad` does not reach. The last one puts the
    sum back, to be reduced as a whole.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, job: Job) -> None:
        configs = job.strategy.gradient_merge_configs
        self._optimizer = optimizer
        self._job = job
        self._k = configs.k_steps
        self._average = configs.avg
        self._parts: dict[Tensor, Tensor] = {}
        self._done = 0
        self._is_whole = False
        self._takes_scaler = False
        # no single backward reduces its gradients
        job.no_sync_depth += 1

    def step(self, step: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Replaces the optimizer's own `step`, and calls it after the k-th backward."""
        self._refuse(args, kwargs)
        # torch's schedulers warn when they step before the optimizer
        count_as_stepped(self._optimizer)
        if self.is_between():
            self._done += 1
            self._put_aside()
            return None
        self.complete()
        result = step()
        self.restart()
        return result

    def is_between(self) -> bool:
        """True when the last backward is not the last of its k."""
        return self._done < self._k - 1

    def complete(self) -> None:
        """Set the gradients to the sum of all k backwards; once, and only after the last one."""
        if self.is_between() or self._is_whole:
            return
        self._is_whole = True
        self._put_aside()
        for parameter, gradient in self._parts.items():
            parameter.grad = gradient.mul_(1.0 / self._k) if self._average else gradient
        self._parts.clear()
        for managed in self._job.models:
            if managed.replica is not None:
                managed.replica.mark_unreduced()

    @contextlib.contextmanager
    def last_step(self) -> Iterator[None]:
        """Allow the step of a loss scaler inside the block; the scaler may skip it."""
        self._takes_scaler = True
        try:
            yield
        finally:
            self._takes_scaler = False
            self.restart()

    def restart(self) -> None:
        """Start with an empty sum."""
        self._parts.clear()
        self._done = 0
        self._is_whole = False

    @torch.no_grad()
    def _put_aside(self) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = self._parts.get(parameter)
                    grad = parameter.grad
                    self._parts[parameter] = grad if part is None else _sum(part, grad)
                    parameter.grad = None

    def _refuse(self, args: Any, kwargs: Any) -> None:
        if args or kwargs:
            raise PlanError(
                "gradient_merge: step was called with a closure, which runs its own backwards; use "
                "one of the two"
            )
        if not self._takes_scaler and scaler_at_work() is not None:
            raise PlanError(
                "gradient_merge: a GradScaler would skip some backwards, and not the same ones on "
                "all workers; use strategy.amp and optimizer.minimize(loss), or fleet.no_sync()"
            )


def _sum(part: Tensor, grad: Tensor) -> Tensor:
    """Add one to the other, in place: torch cannot add dense values to a sparse tensor."""
    if part.is_sparse and not grad.is_sparse:
        part, grad = grad, part
    return part.add_(grad)
