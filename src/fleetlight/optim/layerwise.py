# SPDX-License-Identifier: Apache-2.0
"""`Layerwise`: the base of LARS and LAMB, with a learning rate for each parameter tensor."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fleetlight.errors import ConfigError
from fleetlight.optim.each_parameter import EachParameter

_EXCLUDE = "exclude_from_weight_decay"


def user_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The user's class of an optimizer, without the subclasses that Fleetlight adds."""
    return next(
        kind
        for kind in type(optimizer).__mro__
        if not kind.__module__.startswith("fleetlight.")
        or kind.__module__.startswith("fleetlight.optim.")
    )


class Layerwise(EachParameter):
    """An optimizer that scales the learning rate of each parameter by norms.

    Parameters whose name contains a string of `exclude_from_weight_decay`, such as biases and batch
    norms, get a param group of their own, without decay and scaling.
    """

    def __init__(self, params: ParamsT, exclude: Collection[str], **options: float | Any) -> None:
        if isinstance(exclude, str):
            raise ConfigError(f"{_EXCLUDE}: got the string {exclude!r}, expected a list of strings")
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

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if gradient.is_sparse:
            raise ConfigError(
                f"{type(self).__name__} got a sparse gradient, but needs the norm of a dense one; "
                "build the embedding with sparse=False, or give its weight another optimizer"
            )
        self._update_dense(parameter, gradient, group)

    def _update_dense(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Change a parameter by its dense gradient."""
        raise NotImplementedError


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
