# SPDX-License-Identifier: Apache-2.0
"""Records for training: sharding over workers, readers of well-known data sets, made-up ones."""

from __future__ import annotations

from fleetlight.data.generated.tables import ClickLog
from fleetlight.data.hashing import hash_column, stable_hash
from fleetlight.data.loader import ShardLoader
from fleetlight.data.readers import (
    CIFAR10,
    MNIST,
    Adult,
    Criteo,
    Flowers102,
    ImageDataset,
    ImageFolder,
    LibSVM,
    MovieLens,
    RandomTable,
    Rating,
    SparseRows,
)
from fleetlight.data.readers.file_stream import FileStream
from fleetlight.data.records import Record
from fleetlight.data.words import Corpus, Pairs, SkipGram, Vocabulary

__all__ = [
    "CIFAR10",
    "MNIST",
    "Adult",
    "ClickLog",
    "Corpus",
    "Criteo",
    "FileStream",
    "Flowers102",
    "ImageDataset",
    "ImageFolder",
    "LibSVM",
    "MovieLens",
    "Pairs",
    "RandomTable",
    "Rating",
    "Record",
    "ShardLoader",
    "SkipGram",
    "SparseRows",
    "Vocabulary",
    "hash_column",
    "stable_hash",
]
