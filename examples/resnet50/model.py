# SPDX-License-Identifier: Apache-2.0
"""ResNet-50 in plain PyTorch: 161 parameters, for images from 32 x 32 pixels."""

from __future__ import annotations

from torch import Tensor, nn


class ResNet50(nn.Sequential):
    """Four stages of bottleneck blocks between a 7 x 7 convolution and one linear layer."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.stage1 = stage(64, 64, blocks=3, stride=1)
        self.stage2 = stage(256, 128, blocks=4, stride=2)
        self.stage3 = stage(512, 256, blocks=6, stride=2)
        self.stage4 = stage(1024, 512, blocks=3, stride=2)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, classes))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, added to their input."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.residual = nn.Sequential(
            *(*convolution(inputs, width, 1), nn.ReLU()),
            *(*convolution(width, width, 3, stride), nn.ReLU()),
            *convolution(width, outputs, 1),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.extend(convolution(inputs, outputs, 1, stride))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.residual(x) + self.shortcut(x))


def stage(inputs: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    """Blocks of one width, the first of which changes the size of the image."""
    rest = [Bottleneck(4 * width, width, 1) for _ in range(blocks - 1)]
    return nn.Sequential(Bottleneck(inputs, width, stride), *rest)


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the size at stride 1, and its batch norm."""
    convolve = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolve.weight, mode="fan_out", nonlinearity="relu")
    return [convolve, nn.BatchNorm2d(outputs)]
