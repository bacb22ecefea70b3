# SPDX-License-Identifier: Apache-2.0
"""LARS: momentum with a learning rate for each layer (You, Gitman, Ginsburg 2017)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fleetlight.optim.layerwise import Layerwise, norm, trust


class Lars(Layerwise):
    """Layer-wise adaptive rate scaling, for large batches of images.

    For each parameter w with gradient g:

        rate = lr * lars_coeff * |w| / (|g| + lars_weight_decay * |w| + epsilon)
        v = momentum * v + rate * (g + lars_weight_decay * w)
        w = w - v

    If |w| or |g| is 0, rate = lr. Parameters whose name contains a string of
    `exclude_from_weight_decay` use plain momentum: rate = lr, without decay. Names come from
    `Lars(model.named_parameters(), ...)`.

    Args:
        params: parameters, named parameters or param groups.
        lr: the learning rate.
        momentum: the decay of the velocity.
        lars_coeff: the trust coefficient.
        lars_weight_decay: the weight decay.
        epsilon: added to the denominator.
        exclude_from_weight_decay: parts of the names of parameters that use plain momentum.

    Raises:
        ConfigError: an option is negative, or names are missing.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = fleet.optim.Lars(model.parameters(), lr=1.0)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0.9,
        lars_coeff: float = 0.001,
        lars_weight_decay: float = 0.0005,
        epsilon: float = 0.0,
        exclude_from_weight_decay: Collection[str] = (),
    ) -> None:
        super().__init__(
            params,
            exclude_from_weight_decay,
            lr=lr,
            momentum=momentum,
            lars_coeff=lars_coeff,
            lars_weight_decay=lars_weight_decay,
            epsilon=epsilon,
        )

    def _update_dense(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity = state["momentum_buffer"].mul_(group["momentum"])
        if group["excluded"]:
            velocity.add_(gradient * group["lr"])
        else:
            decayed = gradient.add(parameter, alpha=group["lars_weight_decay"])
            velocity.add_(decayed * (_scale(parameter, gradient, group) * group["lr"]))
        parameter.sub_(velocity)


def _scale(parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
    """The factor of the learning rate for this parameter."""
    weight, slope = norm(parameter), norm(gradient)
    bound = slope + group["lars_weight_decay"] * weight + group["epsilon"]
    scale = trust(weight, slope, bound / group["lars_coeff"])
    return scale.to(parameter.dtype)
