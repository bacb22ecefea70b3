# SPDX-License-Identifier: Apache-2.0
"""Moves the rows of `nn.Embedding(sparse=True)` and `nn.EmbeddingBag(sparse=True)` onto servers.

The module and its Parameter object stay, and the module's forward reads rows from the servers.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fleetlight.errors import PlanError
from fleetlight.kernels.ids.bags import Mode
from fleetlight.ps.layers.embedding import (
    bag_bounds,
    bounds_without,
    ids_of,
    refuse_outside,
)
from fleetlight.ps.layers.handle import TableHandle, Visit
from fleetlight.ps.layers.lookup import embed, embed_bags
from fleetlight.ps.layers.table_weight import stand_for
from fleetlight.ps.update import Floats, Ids
from fleetlight.torch_compat.tensors import without_functions

Movable = nn.Embedding | nn.EmbeddingBag


def is_movable(module: nn.Module) -> bool:
    """True for torch's own layers that ask for sparse gradients."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def refuse_unmovable(path: str, module: nn.Module) -> None:
    """PlanError for options of torch's layers that need all rows in the worker."""
    assert isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    options = {
        "max_norm": module.max_norm is not None,
        "scale_grad_by_freq": bool(module.scale_grad_by_freq),
    }
    for option, is_set in options.items():
        if is_set:
            raise PlanError(
                f"{path}: {type(module).__name__} with {option} cannot be moved to the parameter "
                f"servers; leave {option} out, or build it with sparse=False to keep it on the "
                "workers"
            )


def rows_of(module: Movable) -> Floats:
    """The rows of a module before they are moved."""
    rows: Floats = module.weight.detach().to("cpu", torch.float32).contiguous().numpy()
    return rows


class RemoteEmbedding:
    """Replaces the forward of a layer whose rows are on servers."""

    def __init__(self, module: Movable, handle: TableHandle) -> None:
        self._module = module
        #: reads the rows
        self.handle = handle
        stand_for(cast(nn.Parameter, module.weight), handle.plan.name)
        module.forward = self  # type: ignore[method-assign]

    # the parameters have torch's names
    def __call__(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        module = self._module
        flat = ids_of(input, type(module).__name__)
        self.handle.reached(flat)
        refuse_outside(flat, self.handle.plan.name, module.num_embeddings)
        if isinstance(module, nn.EmbeddingBag):
            bounds = bag_bounds(input, offsets, module.include_last_offset)
            weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
            return self._bags(module, flat, bounds, weights)
        return self._each(flat, input.shape)

    def rows(self, ids: Tensor) -> Tensor:
        """The row of each id, for ids of any shape, including those of a bag layer."""
        flat = ids_of(ids, type(self._module).__name__)
        self.handle.reached(flat)
        refuse_outside(flat, self.handle.plan.name, self._module.num_embeddings)
        return self._each(flat, ids.shape)

    def _each(self, flat: Ids, shape: torch.Size) -> Tensor:
        visit = self._visit(flat)
        out = embed(self._module.weight, visit, None, self._trained(visit))
        return out.view(*shape, self._module.embedding_dim)

    def _bags(
        self, module: nn.EmbeddingBag, flat: Ids, bounds: Ids, weights: Tensor | None
    ) -> Tensor:
        if module.padding_idx is not None:
            real = flat != module.padding_idx
            bounds = bounds_without(bounds, real)
            flat = flat[real]
            weights = None if weights is None else weights[torch.from_numpy(real)]
        return embed_bags(module.weight, weights, self._visit(flat), bounds, _mode(module), None)

    def _visit(self, flat: Ids) -> Visit:
        with without_functions():
            trains = torch.is_grad_enabled() and self._module.weight.requires_grad
        return self.handle.visit(flat, trains)

    def _trained(self, visit: Visit) -> Any:
        """The positions that get gradients: the row of padding is read, but never changed."""
        padding = self._module.padding_idx
        return None if padding is None else visit.wanted.ids != padding

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteEmbedding:
        copy = object.__new__(RemoteEmbedding)
        copy._module, copy.handle = memo[id(self._module)], self.handle
        return copy


def _mode(module: nn.EmbeddingBag) -> Mode:
    mode: Any = module.mode
    return cast(Mode, mode)


def plain_layer(layer: nn.Embedding | nn.EmbeddingBag, weight: Tensor) -> nn.Module:
    """A plain layer of torch, with its own forward and all rows."""
    weight = weight.to(layer.weight.device, layer.weight.dtype)
    kind: Any = nn.Embedding
    settings: dict[str, Any] = {"padding_idx": layer.padding_idx}
    if isinstance(layer, nn.EmbeddingBag):
        settings |= {"mode": layer.mode, "include_last_offset": layer.include_last_offset}
        kind = nn.EmbeddingBag
    plain: nn.Module = kind.from_pretrained(weight, **settings)
    return plain
