# SPDX-License-Identifier: Apache-2.0
"""`fleet.nn`: layers whose rows are stored on the parameter servers."""

from fleetlight.ps.layers.collection.embedding_collection import (
    EmbeddingCollection,
    EmbeddingFeature,
)
from fleetlight.ps.layers.embedding import SparseEmbedding, SparseEmbeddingBag

__all__ = ["EmbeddingCollection", "EmbeddingFeature", "SparseEmbedding", "SparseEmbeddingBag"]
