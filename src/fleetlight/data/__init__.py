# SPDX-License-Identifier: Apache-2.0
"""Records for training: sharding over workers, and readers of well-known data sets."""

from __future__ import annotations

from fleetlight.data.loader import ShardLoader
from fleetlight.data.readers import (
    CIFAR10,
    MNIST,
    Flowers102,
    ImageDataset,
    ImageFolder,
    RandomTable,
)

__all__ = [
    "CIFAR10",
    "MNIST",
    "Flowers102",
    "ImageDataset",
    "ImageFolder",
    "RandomTable",
    "ShardLoader",
]
