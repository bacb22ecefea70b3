# SPDX-License-Identifier: Apache-2.0
"""FTRL-Proximal, which keeps weights without evidence at 0 (McMahan et al. 2013)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fleetlight.optim.each_parameter import EachRow


class Ftrl(EachRow):
    """Follow the regularised leader, with a learning rate for each weight.

    For each weight w with gradient g, with z and n starting at 0:

        z = z + g - (sqrt(n + g * g) - sqrt(n)) / lr * w
        n = n + g * g
        w = 0 if |z| <= l1, else (sign(z) * l1 - z) / ((beta + sqrt(n)) / lr + l2)

    A first value other than 0 is where its weight starts: z then starts so that w is this value. So
    `l1` and `l2` act on the distance from there. A gradient of 0 changes nothing. The state `z` is
    that of the formula times `lr`: a scheduler changes steps to come, not the weights.

    Args:
        params: parameters or param groups, as for torch's optimizers.
        lr: the learning rate.
        beta: added to the root of n.
        l1: the limit below which a weight stays where it starts.
        l2: how strongly weights are drawn to where they start.

    Raises:
        ConfigError: an option is negative.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = fleet.optim.Ftrl(model.parameters(), lr=0.1, l1=0.01)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self, params: ParamsT, lr: float, beta: float = 1.0, l1: float = 0.0, l2: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "l1": l1, "l2": l2})

    def first_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """See `EachRow`."""
        return {name: torch.zeros_like(parameter) for name in ("z", "n")}

    def _moved(
        self, weights: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        lr, z, square = group["lr"], state["z"], gradient * gradient
        edge = lr * group["l1"]
        scale = state["n"].add_(square).sqrt().add(group["beta"] + lr * group["l2"])
        # any weight but 0 determines z, even after a change from elsewhere
        past = torch.where(weights != 0, weights.sign() * edge, -z)
        score = weights * scale - gradient * lr + past
        after = torch.where(score.abs() <= edge, 0.0, (score - score.sign() * edge) / scale)
        changed = square != 0
        z.copy_(torch.where(changed, -score, z))
        return torch.where(changed, after, weights)
