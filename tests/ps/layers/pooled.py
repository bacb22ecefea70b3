# SPDX-License-Identifier: Apache-2.0
"""A model with a bag."""

from typing import Any

from torch import Tensor, nn

from fleetlight.ps.layers.embedding import SparseEmbeddingBag


class Pooled(nn.Module):
    """A bag into a linear layer; ids may have weights."""

    def __init__(self, combiner: Any) -> None:
        super().__init__()
        self.emb = SparseEmbeddingBag(4, combiner, padding_idx=2)
        self.linear = nn.Linear(4, 1)

    def forward(self, ids: Tensor, weights: Tensor | None = None) -> Tensor:
        out: Tensor = self.linear(self.emb(ids, None, weights))
        return out
