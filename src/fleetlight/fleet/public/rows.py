# SPDX-License-Identifier: Apache-2.0
"""`fleet.rows` and `fleet.shrink`: rows of embeddings, including those on servers."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from fleetlight.errors import ConfigError
from fleetlight.fleet.job import ShrunkTable, current, current_or_none
from fleetlight.fleet.plan.remote_embedding import RemoteEmbedding
from fleetlight.ps.layers.embedding import TableLayer


def rows(layer: nn.Module, ids: Tensor) -> Tensor:
    """The row of each id, of shape `[*ids.shape, dim]`; gradients flow back into them.

    `layer` is an embedding or an embedding bag, of `fleet.nn` or of `torch.nn`. Once its rows are
    on parameter servers, its `weight` has no elements, and this function reads the rows. Under
    `torch.no_grad()`, unknown ids read their first values and get no row.

    Args:
        layer: the layer whose rows are read.
        ids: ids of any shape.

    Returns:
        A float tensor of shape `[*ids.shape, dim]`.

    Raises:
        ConfigError: the layer is none of these.

    Example:
        >>> fleet.init()
        >>> model = fleet.distributed_model(fleet.nn.SparseEmbedding(2, initializer="zeros"))
        >>> with torch.no_grad():
        ...     fleet.rows(model, torch.tensor([7, 9]))
        tensor([[0., 0.],
                [0., 0.]])
    """
    if not isinstance(layer, (TableLayer, nn.Embedding, nn.EmbeddingBag)):
        raise ConfigError(
            f"fleet.rows: got a {type(layer).__name__}, expected a fleet.nn.SparseEmbedding, a "
            "fleet.nn.SparseEmbeddingBag, a torch.nn.Embedding or a torch.nn.EmbeddingBag"
        )
    job = current_or_none()
    if job is not None and job.models:
        job.open()
    if isinstance(layer, TableLayer):
        return layer.rows(ids)
    moved = layer.__dict__.get("forward")
    if isinstance(moved, RemoteEmbedding):
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


def shrink(
    unseen_days: int = 0, score: float = 0.0, decay: float = 1.0, table: str | None = None
) -> dict[str, ShrunkTable]:
    """Count one day for the tables that have an entry, and remove rows; every worker calls it.

    Args:
        unseen_days: removes rows that training has not used for more calls of this function than
            this; 0 keeps them however long.
        score: removes rows whose 0.1 * (shows - clicks) + clicks is below this, after the decay.
        decay: the factor of shows and clicks.
        table: the name of one table; None for all.

    Returns:
        `(removed, left)` by table.

    Raises:
        ConfigError: an argument is out of range, or the table has no entry.

    Example:
        >>> fleet.init()
        >>> layer = fleet.nn.SparseEmbedding(2, table="emb", entry=fleet.ShowClickEntry())
        >>> model = fleet.distributed_model(layer)
        >>> _ = model(torch.tensor([7, 9]))
        >>> fleet.shrink(score=1.0)["emb"].removed
        2
    """
    job = current()
    job.refuse_in_server("shrink")
    _check(unseen_days, score, decay)
    return job.shrink(unseen_days, score, decay, table)


def _check(unseen_days: object, score: object, decay: object) -> None:
    if not isinstance(unseen_days, int) or isinstance(unseen_days, bool) or unseen_days < 0:
        raise ConfigError(
            f"fleet.shrink: got unseen_days={unseen_days!r}, expected an integer of 0 or more"
        )
    if not isinstance(score, (int, float)) or not math.isfinite(score):
        raise ConfigError(f"fleet.shrink: got score={score!r}, expected a number")
    if not isinstance(decay, (int, float)) or not 0 < decay <= 1:
        raise ConfigError(f"fleet.shrink: got decay={decay!r}, expected 0 < decay <= 1")
