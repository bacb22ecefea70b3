# SPDX-License-Identifier: Apache-2.0
"""The models that parameter servers are timed with: wide & deep, and word2vec.

Each is written once; only the layer with the rows differs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.peers.ps_timed import DIM, NUMBERS, ROWS, SLOTS, WIDTH

#: makes a layer of that many rows of that width
MakeRows = Callable[[int, int], nn.Module]


class Bags(nn.Module):
    """Plain torch's rows with sparse gradients: bags of one id each."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(rows, dim, mode="sum", sparse=True)
        nn.init.uniform_(self.bag.weight, -0.05, 0.05)

    def forward(self, ids: Tensor) -> Tensor:
        """The row of each id."""
        found: Tensor = self.bag(ids.view(-1, 1))
        return found.view(*ids.shape, -1)


class WideDeep(nn.Module):
    """Log-odds of a click: an MLP over vectors and numbers, and a line through the numbers."""

    def __init__(self, rows: MakeRows) -> None:
        super().__init__()
        self.rows = rows(ROWS["wide_deep"], DIM["wide_deep"])
        self.mlp = nn.Sequential(
            *(nn.Linear(SLOTS * DIM["wide_deep"] + NUMBERS, WIDTH), nn.ReLU()),
            *(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            *(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            nn.Linear(WIDTH, 1),
        )
        self.wide = nn.Linear(NUMBERS, 1)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """Log-odds of each record."""
        deep: Tensor = self.mlp(torch.cat([self.rows(ids).flatten(1), numbers], dim=1))
        wide: Tensor = self.wide(numbers)
        return deep + wide


class Word2Vec(nn.Module):
    """Log-odds that a word stands near another: the product of their vectors."""

    def __init__(self, rows: MakeRows) -> None:
        super().__init__()
        self.centers = rows(ROWS["word2vec"], DIM["word2vec"])
        self.targets = rows(ROWS["word2vec"], DIM["word2vec"])

    def forward(self, centers: Tensor, targets: Tensor) -> Tensor:
        """Log-odds of each target of each center."""
        # not a batched matrix product, whose backward takes three times as long on a CPU
        products: Tensor = self.targets(targets) * self.centers(centers)
        return products.sum(2)


MODELS: dict[str, Callable[[MakeRows], nn.Module]] = {"wide_deep": WideDeep, "word2vec": Word2Vec}
TITLES = {
    "wide_deep": "Wide & deep: 26 slots of one table of 1,000,001 x 9, 13 numbers, 3 x 400, SGD, "
    "batch 512",
    "word2vec": "Word2vec: 2 tables of 100,000 x 64, 5 negatives, SGD, batch 512",
}
