# SPDX-License-Identifier: Apache-2.0
"""`Layerwise`: the base of LARS and LAMB, with a learning rate for each parameter tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fleetlight.errors import ConfigError

_EXCLUDE = "exclude_from_weight_decay"


def user_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The user's class of an optimizer, without the subclasses that Fleetlight adds."""
    return next(
        kind
        for kind in type(optimizer).__mro__
        if not kind.__module__.startswith("fleetlight.")
        or kind.__module__.startswith("fleetlight.optim.")
    )


class Layerwise(torch.optim.Optimizer):
    """An optimizer that scales the learning rate of each parameter by norms.

    Parameters whose name contains a string of `exclude_from_weight_decay`, such as biases and batch
    norms, get a param group of their own, without decay and scaling.
    """

    def __init__(self, params: ParamsT, exclude: Collection[str], **options: float | Any) -> None:
        if isinstance(exclude, str):
            raise ConfigError(f"{_EXCLUDE}: got the string {exclude!r}, expected a list of strings")
        for name, value in options.items():
            if isinstance(value, (int, float)) and not (value >= 0 and math.isfinite(value)):
                raise ConfigError(f"{type(self).__name__}: got {name}={value}, expected 0 or more")
        super().__init__(params, {**options, _EXCLUDE: list(exclude), "excluded": False})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, split in two if some of its parameters are excluded."""
        exclude = param_group.get(_EXCLUDE, self.defaults[_EXCLUDE])
        params = param_group["params"]
        if not exclude or "excluded" in param_group or isinstance(params, set):
            super().add_param_group(param_group)
            return
        entries = [params] if isinstance(params, Tensor) else list(params)
        if any(isinstance(entry, Tensor) for entry in entries):
            raise ConfigError(
                f"{type(self).__name__}: {_EXCLUDE}={list(exclude)} needs names, but the "
                "parameters have none; pass model.named_parameters() in place of model.parameters()"
            )
        matches = [any(word in name for word in exclude) for name, _ in entries]
        for excluded in (False, True):
            part = [e for e, match in zip(entries, matches, strict=True) if match is excluded]
            if part:
                super().add_param_group({**param_group, "params": part, "excluded": excluded})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step; return the loss of `closure`, which computes the gradients, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = self._gradient(parameter)
                if gradient is not None:
                    self._update(parameter, gradient, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Change a parameter by its gradient."""
        raise NotImplementedError

    def _gradient(self, parameter: Tensor) -> Tensor | None:
        """The gradient, which must be dense."""
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            raise ConfigError(
                f"{type(self).__name__} got a sparse gradient, but needs the norm of a dense one; "
                "build the embedding with sparse=False, or give its weight another optimizer"
            )
        return gradient


def norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm, summed in float32 at least."""
    kind = torch.promote_types(tensor.dtype, torch.float32)
    length: Tensor = torch.linalg.vector_norm(tensor, dtype=kind)
    return length


def trust(weight: Tensor, length: Tensor, bound: Tensor) -> Tensor:
    """`weight / bound`, or 1 if one of the norms `weight` and `length` is 0."""
    both = (weight > 0) & (length > 0)
    # both branches are computed, so neither may divide by 0
    ratio = weight / torch.where(both, bound, torch.ones_like(bound))
    return torch.where(both, ratio, torch.ones_like(ratio))
