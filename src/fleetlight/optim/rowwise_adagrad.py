# SPDX-License-Identifier: Apache-2.0
"""Adagrad with one accumulator for each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fleetlight.optim.each_parameter import EachRow, number_by_row, row_means


class RowwiseAdagrad(EachRow):
    """Adagrad whose accumulator is one number for each row, for embeddings.

    For each row w with gradient g, in step t:

        g = g + weight_decay * w
        s = s + mean(g * g)
        w = w - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps)

    A row has all elements of one index of the first dimension, so a vector has rows of one element.

    Args:
        params: parameters or param groups.
        lr: the learning rate.
        lr_decay: how the learning rate falls with the steps.
        weight_decay: the weight decay.
        initial_accumulator_value: the first value of s.
        eps: added to the root of s.

    Raises:
        ConfigError: an option is negative.

    Example:
        >>> layer = nn.Embedding(100, 8, sparse=True)
        >>> optimizer = fleet.optim.RowwiseAdagrad(layer.parameters(), lr=0.05)
        >>> layer(torch.tensor([7])).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[layer.weight]["sum"].shape
        torch.Size([100, 1])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        options = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        options["initial_accumulator_value"] = initial_accumulator_value
        super().__init__(params, options)

    def first_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """See `EachRow`."""
        total = number_by_row(parameter, group["initial_accumulator_value"])
        return {"step": torch.zeros(()), "sum": total}

    def _moved(
        self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        # in double precision, as on servers
        count = state["step"].add_(1).to(torch.float64)
        gradient = gradient.add(weights, alpha=group["weight_decay"])
        root = state["sum"].add_(row_means(gradient * gradient)).sqrt()
        rate = group["lr"] / (1 + (count - 1) * group["lr_decay"])
        moved: Tensor = weights - gradient / (root + group["eps"]) * rate
        return moved
