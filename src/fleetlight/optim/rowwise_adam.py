# SPDX-License-Identifier: Apache-2.0
"""Adam with one second moment for each row: half of Adam's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fleetlight.optim.each_parameter import EachRow, number_by_row, row_means


class RowwiseAdam(EachRow):
    """Adam whose second moment is one number for each row, for embeddings.

    For each row w with gradient g, in step t:

        g = g + weight_decay * w
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * mean(g * g)
        w = w - lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)

    A row has all elements of one index of the first dimension, so a vector has rows of one element.

    Args:
        params: parameters or param groups.
        lr: the learning rate.
        betas: the decay of both moments.
        eps: added to the root of the second moment.
        weight_decay: the weight decay.

    Raises:
        ConfigError: an option is out of range.

    Example:
        >>> layer = nn.Embedding(100, 8, sparse=True)
        >>> optimizer = fleet.optim.RowwiseAdam(layer.parameters(), lr=0.01)
        >>> layer(torch.tensor([7])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[layer.weight]["exp_avg_sq"].shape
        torch.Size([100, 1])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)

    def first_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """See `EachRow`."""
        mean, square = torch.zeros_like(parameter), number_by_row(parameter, 0.0)
        return {"step": torch.zeros(()), "exp_avg": mean, "exp_avg_sq": square}

    def _moved(
        self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        beta1, beta2 = group["betas"]
        # powers of numbers near 1 need double precision
        count = state["step"].add_(1).to(torch.float64)
        gradient = gradient.add(weights, alpha=group["weight_decay"])
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].lerp_(row_means(gradient * gradient), 1 - beta2)
        rate = group["lr"] * (1 - beta2**count).sqrt() / (1 - beta1**count)
        moved: Tensor = weights - mean / (square.sqrt() + group["eps"]) * rate
        return moved
