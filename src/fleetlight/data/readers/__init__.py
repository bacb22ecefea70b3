# SPDX-License-Identifier: Apache-2.0
"""Readers of well-known data sets from local files. Nothing here ever downloads anything.

Readers of images are map-style data sets of `(image, label)` pairs: images are float32 `[C, H, W]`
in 0..1 made from uint8 when asked for, labels are ints from 0. Readers of tables are map-style data
sets of named tuples, held in memory; their `parse` works on the lines of a `FileStream` too.
"""

from __future__ import annotations

from fleetlight.data.generated.tables import RandomTable
from fleetlight.data.readers.images.cifar10 import CIFAR10
from fleetlight.data.readers.images.dataset import ImageDataset
from fleetlight.data.readers.images.flowers import Flowers102
from fleetlight.data.readers.images.folder import ImageFolder
from fleetlight.data.readers.images.mnist import MNIST
from fleetlight.data.readers.tables.adult import Adult
from fleetlight.data.readers.tables.criteo import Criteo
from fleetlight.data.readers.tables.libsvm import LibSVM, SparseRows
from fleetlight.data.readers.tables.movielens import MovieLens, Rating

__all__ = [
    "CIFAR10",
    "MNIST",
    "Adult",
    "Criteo",
    "Flowers102",
    "ImageDataset",
    "ImageFolder",
    "LibSVM",
    "MovieLens",
    "RandomTable",
    "Rating",
    "SparseRows",
]
