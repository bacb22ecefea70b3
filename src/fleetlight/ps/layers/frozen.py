# SPDX-License-Identifier: Apache-2.0
"""Tables for inference: layers of pure torch with constant rows in buffers.

A lookup searches the sorted ids. An unknown id reads its first value, computed from the id
bit-equal to the servers, with torch's signed 64-bit integers in place of unsigned ones.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from fleetlight.kernels import Initializer
from fleetlight.kernels.ids.hashing import FIRST, GAMMA, SECOND
from fleetlight.kernels.rows.first_values import (
    NORMAL_BITS,
    NORMAL_MEAN,
    UNIFORM_BITS,
    as_int64,
)
from fleetlight.ps.layers.embedding import SparseEmbedding, SparseEmbeddingBag, TableLayer

_WORDS_OF_NORMAL = 3


class FrozenRows(nn.Module):
    """The rows of a table; `ids` are ascending."""

    ids: Tensor
    rows: Tensor

    def __init__(self, ids: Tensor, rows: Tensor, seed: int, initializer: Initializer) -> None:
        super().__init__()
        self.register_buffer("ids", ids)
        self.register_buffer("rows", rows)
        self._seed = seed
        self._initializer = initializer

    def forward(self, ids: Tensor) -> Tensor:
        """Return a row for each id of a 1-D tensor."""
        first = first_values(ids, self.rows.shape[1], self._seed, self._initializer)
        if not len(self.ids):
            return first
        places = torch.searchsorted(self.ids, ids).clamp(max=len(self.ids) - 1)
        known = self.ids[places] == ids
        return torch.where(known.unsqueeze(1), self.rows[places], first)


class FrozenEmbedding(nn.Module):
    """Replaces a `SparseEmbedding` in an exported model."""

    def __init__(self, layer: SparseEmbedding, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self._padding_idx = layer.padding_idx
        self._dim = layer.dim
        self._dtype = layer.weight.dtype

    def forward(
        self, ids: Tensor, show: Tensor | None = None, click: Tensor | None = None
    ) -> Tensor:
        """Return rows for ids of any shape."""
        flat = ids.reshape(-1).long()
        rows = cast(Tensor, self.rows(flat))
        if self._padding_idx is not None:
            rows = rows.masked_fill((flat == self._padding_idx).unsqueeze(1), 0)
        return rows.to(self._dtype).view(*ids.shape, self._dim)


class FrozenEmbeddingBag(nn.Module):
    """Replaces a `SparseEmbeddingBag` in an exported model."""

    def __init__(self, layer: SparseEmbeddingBag, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows
        self._padding_idx = layer.padding_idx
        self._combiner = layer.combiner
        self._include_last = layer.include_last_offset
        self._dtype = layer.weight.dtype

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        show: Tensor | None = None,
        click: Tensor | None = None,
    ) -> Tensor:
        """Bags are the rows of 2-D ids, or start at `offsets` of 1-D ids."""
        flat = ids.reshape(-1).long()
        bags, count = self._bags(ids, offsets)
        real = torch.ones_like(flat, dtype=torch.bool)
        if self._padding_idx is not None:
            real = flat != self._padding_idx
        rows = cast(Tensor, self.rows(flat))
        if self._combiner == "max":
            out = _maximum(rows, bags, real, count)
        else:
            shares = real.to(rows.dtype)
            if per_sample_weights is not None:
                shares = shares * per_sample_weights.reshape(-1).to(rows.dtype)
            sums = rows.new_zeros(count, rows.shape[1])
            out = sums.index_add(0, bags, rows * shares.unsqueeze(1))
            if self._combiner == "mean":
                out = out / _lengths(bags, real, count).clamp(min=1).unsqueeze(1)
        return out.to(self._dtype)

    def _bags(self, ids: Tensor, offsets: Tensor | None) -> tuple[Tensor, int]:
        """The bag of each id, and the number of bags."""
        if offsets is None:
            bags = torch.arange(ids.shape[0], device=ids.device)
            return bags.repeat_interleave(ids.shape[1]), ids.shape[0]
        starts = offsets.long()
        starts = starts[:-1] if self._include_last else starts
        places = torch.arange(ids.shape[0], device=ids.device)
        return torch.searchsorted(starts, places, right=True) - 1, starts.shape[0]


def frozen(layer: TableLayer, rows: nn.Module) -> nn.Module:
    """The replacement of a layer in an exported model; `rows` returns a row for each id."""
    if isinstance(layer, SparseEmbeddingBag):
        return FrozenEmbeddingBag(layer, rows)
    assert isinstance(layer, SparseEmbedding), layer
    return FrozenEmbedding(layer, rows)


def first_values(ids: Tensor, dim: int, seed: int, initializer: Initializer) -> Tensor:
    """The first row of each id: `kernels.rows.first_values`, in operations of torch."""
    if initializer.kind in ("zeros", "constant"):
        return torch.full((ids.shape[0], dim), initializer.offset, device=ids.device)
    streams = _mix(_mix(ids) ^ as_int64(seed)).unsqueeze(1)
    columns = torch.arange(dim, device=ids.device).unsqueeze(0)
    if initializer.is_normal:
        numbers = _sum_of_twelve(streams + columns * _signed(_WORDS_OF_NORMAL * int(GAMMA)))
        numbers = numbers - NORMAL_MEAN
    else:
        numbers = _shifted(_mix(streams + columns * _signed(int(GAMMA))), 64 - UNIFORM_BITS)
    return (numbers.double() * initializer.step + initializer.offset).float()


def _sum_of_twelve(streams: Tensor) -> Tensor:
    total = torch.zeros_like(streams)
    for k in range(_WORDS_OF_NORMAL):
        word = _mix(streams + _signed(k * int(GAMMA)))
        for part in range(64 // NORMAL_BITS):
            total = total + (_shifted(word, part * NORMAL_BITS) & 0xFFFF)
    return total


def _mix(words: Tensor) -> Tensor:
    """One step of splitmix64, as in `kernels.ids.hashing`; torch's products wrap around, too."""
    z = words + _signed(int(GAMMA))
    z = (z ^ _shifted(z, 30)) * _signed(int(FIRST))
    z = (z ^ _shifted(z, 27)) * _signed(int(SECOND))
    return z ^ _shifted(z, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: torch's shift extends the sign."""
    return words if bits == 0 else (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """Reinterpret an unsigned word as int64."""
    word %= 1 << 64
    return word - (1 << 64) if word >> 63 else word


def _maximum(rows: Tensor, bags: Tensor, real: Tensor, count: int) -> Tensor:
    """The maximum of each column in each bag; zero for an empty bag."""
    candidates = rows.masked_fill(~real.unsqueeze(1), -torch.inf)
    places = bags.unsqueeze(1).expand(-1, rows.shape[1])
    out = rows.new_zeros(count, rows.shape[1])
    out = out.scatter_reduce(0, places, candidates, "amax", include_self=False)
    return out.masked_fill((_lengths(bags, real, count) == 0).unsqueeze(1), 0)


def _lengths(bags: Tensor, real: Tensor, count: int) -> Tensor:
    """The number of ids in each bag, without padding."""
    lengths = torch.zeros(count, dtype=torch.float32, device=bags.device)
    return lengths.index_add(0, bags, real.float())
