# SPDX-License-Identifier: Apache-2.0
"""A small net whose parts are easily captured wrongly, and its batches."""

import torch
from torch import Tensor, nn

from fleetlight import static

SIZES = (16, 7, 1, 33)


def net() -> nn.Module:
    """In double precision, so that a difference is an error."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))
    ).double()


def batch(number: int) -> dict[str, Tensor]:
    """Batches of different sizes, each of two samples or more, as batch norm needs."""
    torch.manual_seed(100 + number)
    size = max(2, SIZES[number % len(SIZES)])
    return {"x": torch.randn(size, 8).double(), "y": torch.randint(0, 3, (size,))}


def accuracy(output: Tensor, labels: Tensor) -> Tensor:
    """The share of correct predictions."""
    return (output.argmax(1) == labels).double().mean()


def captured(model: nn.Module, optimizer: torch.optim.Optimizer) -> static.Program:
    """A training step of the net."""
    loss = nn.functional.cross_entropy
    return static.capture(model, loss, optimizer, batch(0), {"accuracy": accuracy})
