# SPDX-License-Identifier: Apache-2.0
"""DeepFM: products of all pairs of fields, and an MLP, over the same vectors. Plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DeepFM(nn.Module):
    """Log-odds of a click from numbers and ids; ids that are equal modulo `rows` share a row."""

    def __init__(
        self,
        rows: int = 200_003,
        fields: int = 26,
        numbers: int = 13,
        dim: int = 8,
        width: int = 128,
    ) -> None:
        super().__init__()
        self.rows = rows
        self.weights = nn.EmbeddingBag(rows, 1, mode="sum", sparse=True)
        self.vectors = nn.Embedding(rows, dim, sparse=True)
        nn.init.zeros_(self.weights.weight)
        nn.init.uniform_(self.vectors.weight, -0.05, 0.05)
        self.linear = nn.Linear(numbers, 1)
        self.mlp = nn.Sequential(
            *(nn.Linear(fields * dim + numbers, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, 1),
        )

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        ids = ids % self.rows
        vectors = self.vectors(ids)
        first = self.weights(ids) + self.linear(dense)
        # the sum over pairs, without a loop
        second = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True) / 2
        deep = self.mlp(torch.cat([vectors.flatten(1), dense], dim=1))
        return (first + second + deep).squeeze(1)
