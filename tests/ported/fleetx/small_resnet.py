# SPDX-License-Identifier: Apache-2.0
"""A minimal residual network, and generated images of flowers."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

CLASSES = 10


class ResNet(nn.Module):
    """One block with a skip connection; `net` is the method that writes the static program."""

    def __init__(self, class_dim: int = CLASSES) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8))
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, class_dim)

    def forward(self, image: Tensor) -> Tensor:
        first = torch.relu(self.stem(image))
        return self.head(torch.relu(first + self.block(first)).mean((2, 3)))

    def net(self, input: Tensor) -> Tensor:
        """Writes the network into a program."""
        return self.forward(input)


def flowers() -> TensorDataset:
    """Each class has its own colour; labels are a column, as the document reads them."""
    draws = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (512, 1), generator=draws)
    colours = torch.rand(CLASSES, 3, 1, 1, generator=draws)
    images = colours[labels[:, 0]] + 0.05 * torch.randn(512, 3, 16, 16, generator=draws)
    return TensorDataset(images, labels)
