# SPDX-License-Identifier: Apache-2.0
"""The bases of Fleetlight's optimizers, which step one parameter after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fleetlight.errors import ConfigError


class EachParameter(torch.optim.Optimizer):
    """An optimizer that steps one parameter after the other, with checked options."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group; numbers in it must not be negative."""
        options, kind = {**self.defaults, **param_group}, type(self).__name__
        for name, value in options.items():
            if isinstance(value, (int, float)) and not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{kind}: got {name}={value}, expected 0 or more")
        betas = options.get("betas", ())
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"{kind}: got betas={betas}, expected each at least 0 and below 1")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step; return the loss of `closure`, which computes the gradients, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Change a parameter by its gradient."""
        raise NotImplementedError


class EachRow(EachParameter):
    """An optimizer that changes only the rows of a sparse gradient, as servers do."""

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self.first_state(parameter, group))
        if not gradient.is_sparse:
            parameter.copy_(self._moved(parameter, gradient, state, group))
            return
        gradient = gradient.coalesce()
        [rows] = gradient.indices()
        part = {name: value[rows] if value.dim() else value for name, value in state.items()}
        parameter[rows] = self._moved(parameter[rows], gradient.values(), part, group)
        for name, value in part.items():
            if value.dim():
                state[name][rows] = value

    def first_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """The state before the first step."""
        raise NotImplementedError

    def _moved(
        self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        """The weights after a step, which changes `state` in place."""
        raise NotImplementedError


def number_by_row(parameter: Tensor, value: float) -> Tensor:
    """A number for each row, in a shape that broadcasts with the parameter."""
    shape = [*parameter.shape[:1], *[1] * (parameter.dim() - 1)]
    return parameter.new_full(shape, value)


def row_means(values: Tensor) -> Tensor:
    """The mean of each row."""
    return values.mean(list(range(1, values.dim())), keepdim=True) if values.dim() > 1 else values
