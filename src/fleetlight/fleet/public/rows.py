# SPDX-License-Identifier: Apache-2.0
"""`fleet.rows`: the rows of an embedding, wherever they are."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fleetlight.errors import ConfigError
from fleetlight.fleet.context import current_or_none
from fleetlight.fleet.plan.remote_embedding import MovedForward
from fleetlight.ps.layers.embedding import TableLayer


def rows(layer: nn.Module, ids: Tensor) -> Tensor:
    """The row of each id, of shape `[*ids.shape, dim]`; gradients flow back into them.

    `layer` is an embedding or an embedding bag, of `fleet.nn` or of `torch.nn`. Its `weight` has no
    elements once its rows are on parameter servers; this reads them in every mode. Under
    `torch.no_grad()` unknown ids read their first values and get no row.
    """
    if not isinstance(layer, (TableLayer, nn.Embedding, nn.EmbeddingBag)):
        raise ConfigError(
            f"fleet.rows: got a {type(layer).__name__}, expected a fleet.nn.SparseEmbedding, a "
            "fleet.nn.SparseEmbeddingBag, a torch.nn.Embedding or a torch.nn.EmbeddingBag"
        )
    context = current_or_none()
    if context is not None and context.models:
        context.open()
    if isinstance(layer, TableLayer):
        return layer.rows(ids)
    moved = layer.__dict__.get("forward")
    if isinstance(moved, MovedForward):
        return moved.rows(ids)
    return F.embedding(
        ids,
        layer.weight,
        layer.padding_idx,
        layer.max_norm,
        layer.norm_type,
        layer.scale_grad_by_freq,
        layer.sparse,
    )
