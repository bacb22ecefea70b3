# SPDX-License-Identifier: Apache-2.0
"""The timed models: small ones, which show overhead, and ResNet-50."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES = 10


def mlp(widths: tuple[int, ...] = (784, 128, 128, CLASSES)) -> nn.Sequential:
    """Linear layers with tanh between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def tiny_mlp() -> nn.Sequential:
    """A tiny MLP."""
    return mlp((32, 64, 64, 2))


def deep_mlp() -> nn.Sequential:
    """Eight linear layers of 128: many small gradients."""
    return mlp((128,) * 8 + (CLASSES,))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut; the 3x3 one carries the stride."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *_convolution(channels, width, 1), nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride), nn.ReLU(inplace=True),
            *_convolution(width, out, 1),
        )  # fmt: skip
        same = channels == out and stride == 1
        self.shortcut: nn.Module = nn.Identity()
        if not same:
            self.shortcut = nn.Sequential(*_convolution(channels, out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        return functional.relu(self.body(x) + self.shortcut(x))


def resnet50() -> nn.Sequential:
    """ResNet-50 for images of any size from 32x32 up."""
    layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            stride = 2 if block == 0 and width > 64 else 1
            layers.append(Bottleneck(channels, width, stride))
            channels = 4 * width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
    return nn.Sequential(*layers, *head)


def _convolution(fan_in: int, fan_out: int, size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    weights = nn.Conv2d(fan_in, fan_out, size, stride, size // 2, bias=False)
    return weights, nn.BatchNorm2d(fan_out)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam at its usual rate."""
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum 0.9."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its optimizer, and one worker's batch of synthetic data."""

    title: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    shape: tuple[int, ...]
    batch: int
    classes: int = CLASSES

    def batches(self, count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        """`count` batches, the same for the same seed."""
        random = torch.Generator().manual_seed(seed)
        return [
            (
                torch.rand(self.batch, *self.shape, generator=random),
                torch.randint(self.classes, (self.batch,), generator=random),
            )
            for _ in range(count)
        ]


WORKLOADS = {
    "mlp": Workload("MLP 784-128-128-10, batch 64, Adam", mlp, adam, (1, 28, 28), 64),
    "mlp8": Workload("MLP of 8 layers of 128, batch 16, Adam", deep_mlp, adam, (128,), 16),
    "tiny": Workload("MLP 32-64-64-2, batch 32, momentum", tiny_mlp, momentum, (32,), 32, 2),
    "mnist": Workload("MLP 784-128-128-10, batch 8, Adam", mlp, adam, (1, 28, 28), 8),
    "resnet50": Workload("ResNet-50, 32x32, batch 8, momentum", resnet50, momentum, (3, 32, 32), 8),
    "resnet50_224": Workload(
        "ResNet-50, 224x224, batch 8, momentum", resnet50, momentum, (3, 224, 224), 8
    ),
}
