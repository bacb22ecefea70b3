# SPDX-License-Identifier: Apache-2.0
"""The public names of `fleetlight.data`; they load when a script uses the first of them."""

from __future__ import annotations

from fleetlight.data.columns.dataset import ColumnFiles
from fleetlight.data.columns.decoding import Ragged
from fleetlight.data.columns.reading import arrow, criteo, csv, parquet
from fleetlight.data.generated.tables import ClickLog, RandomTable
from fleetlight.data.hashing import hash_column, stable_hash
from fleetlight.data.loader import ShardLoader
from fleetlight.data.readers.file_stream import FileStream
from fleetlight.data.readers.images.cifar10 import CIFAR10
from fleetlight.data.readers.images.dataset import ImageDataset
from fleetlight.data.readers.images.flowers import Flowers102
from fleetlight.data.readers.images.folder import ImageFolder
from fleetlight.data.readers.images.mnist import MNIST
from fleetlight.data.readers.tables.adult import Adult
from fleetlight.data.readers.tables.criteo import Criteo
from fleetlight.data.readers.tables.libsvm import LibSVM, SparseRows
from fleetlight.data.readers.tables.movielens import MovieLens, Rating
from fleetlight.data.records import Record
from fleetlight.data.tars.dataset import TarFiles, webdataset
from fleetlight.data.words.corpus import Corpus
from fleetlight.data.words.skip_gram import Pairs, SkipGram
from fleetlight.data.words.vocabulary import Vocabulary

__all__ = [
    "CIFAR10",
    "MNIST",
    "Adult",
    "ClickLog",
    "ColumnFiles",
    "Corpus",
    "Criteo",
    "FileStream",
    "Flowers102",
    "ImageDataset",
    "ImageFolder",
    "LibSVM",
    "MovieLens",
    "Pairs",
    "Ragged",
    "RandomTable",
    "Rating",
    "Record",
    "ShardLoader",
    "SkipGram",
    "SparseRows",
    "TarFiles",
    "Vocabulary",
    "arrow",
    "criteo",
    "csv",
    "hash_column",
    "parquet",
    "stable_hash",
    "webdataset",
]
