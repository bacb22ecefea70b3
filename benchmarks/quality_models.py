# SPDX-License-Identifier: Apache-2.0
"""The model and the records of the quality benchmarks: wide & deep, with training and test sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.jobs import BenchmarkError
from fleetlight.data import Adult, ClickLog, MovieLens, Record
from fleetlight.data.records import BatchedDataset, TableDataset

DIM, WIDTH = 8, 64
#: the generated click log: the rarest ids of 20,000 are seen some times
VOCABULARY, TEST = 20_000, 50_000
#: the share of real records that is kept for the test
HELD_BACK = 0.2
#: a film that is liked has this many stars
LIKED = 4.0
#: what files are called, in the folder of data or below
FILES = {"adult": "adult.data", "movielens": "ratings.csv"}
#: makes a layer of rows of that width; the wide one adds up its rows
MakeRows = Callable[[int, bool], nn.Module]


class WideDeep(nn.Module):
    """Log-odds: a weight for each id and number, plus an MLP over vectors of the ids."""

    def __init__(self, fields: int, numbers: int, rows: MakeRows) -> None:
        super().__init__()
        self.wide = rows(1, True)
        self.deep = rows(DIM, False)
        self.linear = nn.Linear(numbers, 1)
        self.mlp = nn.Sequential(
            *(nn.Linear(fields * DIM + numbers, WIDTH), nn.ReLU()),
            *(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            nn.Linear(WIDTH, 1),
        )

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Log-odds of each record."""
        wide: Tensor = self.wide(ids) + self.linear(dense)
        deep: Tensor = self.mlp(torch.cat([self.deep(ids).flatten(1), dense], dim=1))
        return (wide + deep).squeeze(1)


def torch_rows(count: int) -> MakeRows:
    """Torch's own layers; on parameter servers their rows move to tables, values and all."""

    def rows(dim: int, wide: bool) -> nn.Module:
        layer: nn.Embedding | nn.EmbeddingBag
        if wide:
            layer = nn.EmbeddingBag(count, dim, mode="sum", sparse=True)
            nn.init.zeros_(layer.weight)
        else:
            layer = nn.Embedding(count, dim, sparse=True)
            nn.init.uniform_(layer.weight, -0.05, 0.05)
        return layer

    return rows


def open_rows(dim: int, wide: bool) -> nn.Module:
    """Tables for any int64."""
    import fleetlight as fleet

    if wide:
        return fleet.nn.SparseEmbeddingBag(dim, "sum", initializer="zeros")
    return fleet.nn.SparseEmbedding(dim)


@dataclasses.dataclass(frozen=True)
class Task:
    """Records to train and to test on; `rows` ids there are, None for an open number."""

    train: BatchedDataset[Record]
    test: BatchedDataset[Record]
    rows: int | None
    best_auc: float | None = None

    def model(self) -> WideDeep:
        """A model with first values from torch's seed."""
        one = self.train.batch([0])
        make = open_rows if self.rows is None else torch_rows(self.rows)
        return WideDeep(one.ids.shape[1], one.dense.shape[1], make)


def task(name: str, data: str, seed: int, samples: int) -> Task:
    """The records of one of the three; `data` is the folder of real ones."""
    if name == "clicks":
        test = ClickLog(TEST, seed=seed, start=samples, vocabulary=VOCABULARY)
        log = ClickLog(samples, seed=seed, vocabulary=VOCABULARY)
        return Task(log, test, None, test.best_auc)
    return split(compact({"adult": adult, "movielens": movielens}[name](data)), seed)


def adult(data: str) -> TableDataset[Record]:
    """The census."""
    return Adult(_file(data, "adult"), stand_in=not data)


def movielens(data: str) -> TableDataset[Record]:
    """Who likes which film, and when that was said."""
    ratings = MovieLens(_file(data, "movielens"), stand_in=not data)
    user, film, stars, time = ratings.columns
    # a user and a film of the same number are two ids
    ids = torch.stack([2 * user, 2 * film + 1], dim=1)
    when = (time - time.min()).double() / max(1, int(time.max() - time.min()))
    label = (stars >= LIKED).float()
    return TableDataset(ratings.name, Record(when[:, None].float(), ids, label))


def compact(records: TableDataset[Record]) -> TableDataset[Record]:
    """The same records with ids from 0 on, which torch's own layers need."""
    columns = records.columns
    places = np.unique(columns.ids.numpy(), return_inverse=True)[1]
    ids = torch.from_numpy(places).view(columns.ids.shape)
    return TableDataset(records.name, Record(columns.dense, ids, columns.label))


def split(records: TableDataset[Record], seed: int) -> Task:
    """Another part for the test with every seed."""
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(seed))
    cut = int(len(records) * HELD_BACK)
    test, train = (
        TableDataset(records.name, records.batch(part)) for part in (order[:cut], order[cut:])
    )
    return Task(train, test, int(records.columns.ids.max()) + 1)


def _file(data: str, name: str) -> Path:
    """Where the file lies; made-up records of the same shape need none."""
    if not data:
        return Path(data)
    found = sorted(Path(data).rglob(FILES[name]))
    if not found:
        raise BenchmarkError(f"no {FILES[name]} in {data} or below; give --data another folder")
    return found[0]
