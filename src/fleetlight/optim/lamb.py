# SPDX-License-Identifier: Apache-2.0
"""LAMB: Adam with a learning rate for each layer (You et al. 2020)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fleetlight.optim.layerwise import Layerwise, norm, trust


class Lamb(Layerwise):
    """Layer-wise adaptive moments, for large batches of sentences.

    For each parameter w with gradient g, in step t:

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + lamb_weight_decay * w
        w = w - lr * |w| / |r| * r

    If |w| or |r| is 0, the ratio |w| / |r| is 1. Parameters whose name contains a string of
    `exclude_from_weight_decay` take a step of Adam: no decay, and the ratio 1. Names come from
    `Lamb(model.named_parameters(), ...)`.

    Args:
        params: parameters, named parameters or param groups.
        lr: the learning rate.
        betas: the decay of both moments.
        epsilon: added to the root of the second moment.
        lamb_weight_decay: the weight decay.
        exclude_from_weight_decay: parts of the names of parameters that take a step of Adam.

    Raises:
        ConfigError: an option is out of range, or names are missing.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> named = model.named_parameters()
        >>> optimizer = fleet.optim.Lamb(named, exclude_from_weight_decay=["bias"])
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-6,
        lamb_weight_decay: float = 0.01,
        exclude_from_weight_decay: Collection[str] = (),
    ) -> None:
        super().__init__(
            params,
            exclude_from_weight_decay,
            lr=lr,
            betas=betas,
            epsilon=epsilon,
            lamb_weight_decay=lamb_weight_decay,
        )

    def _update_dense(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        update = _adam(self.state[parameter], parameter, gradient, group)
        if group["excluded"]:
            parameter.sub_(update * group["lr"])
            return
        update = update.add(parameter, alpha=group["lamb_weight_decay"])
        weight, length = norm(parameter), norm(update)
        ratio = trust(weight, length, length).to(parameter.dtype)
        parameter.sub_(update * (ratio * group["lr"]))


def _adam(
    state: dict[str, Any], parameter: Tensor, gradient: Tensor, group: dict[str, Any]
) -> Tensor:
    """Update the moments of Adam and return its direction."""
    if "step" not in state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    beta1, beta2 = group["betas"]
    # powers of numbers near 1 need double precision
    count = state["step"].add_(1).to(torch.float64)
    mean = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).add_(gradient * gradient, alpha=1 - beta2)
    deviation = (square / (1 - beta2**count)).sqrt_() + group["epsilon"]
    direction: Tensor = mean / (1 - beta1**count) / deviation
    return direction
