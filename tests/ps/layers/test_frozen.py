# SPDX-License-Identifier: Apache-2.0
"""Frozen tables, compared with the kernels' first values and with the layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fleetlight import kernels
from fleetlight.kernels import Initializer
from fleetlight.ps.layers import frozen as f
from fleetlight.ps.layers.embedding import SparseEmbedding, SparseEmbeddingBag
from fleetlight.ps.layers.handle import TableHandle
from fleetlight.ps.plan import InitializerPlan, RulePlan, TablePlan

EDGES = [0, 1, -1, 2**63 - 1, -(2**63), 2**62, -(2**33)]
IDS = np.concatenate([EDGES, np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 500)])
HOW = Initializer("normal", 0.1, 0.3)
SEED = 2**62 + 12345


@pytest.mark.parametrize("seed", [0, 7, -3, SEED, 2**64 - 1])
@pytest.mark.parametrize(
    "how",
    [
        Initializer("uniform", -0.05, 0.05),
        Initializer("uniform", 3.0, 1000.0),
        HOW,
        Initializer("constant", 0.7),
        Initializer("zeros"),
    ],
)
def test_first_values_equal_the_kernels_bit_for_bit(how: Initializer, seed: int) -> None:
    mine = f.first_values(torch.from_numpy(IDS), 5, seed, how).numpy()
    theirs = kernels.first_values(IDS, 5, seed, how)
    assert np.array_equal(mine.view(np.int32), theirs.view(np.int32))


KNOWN = np.sort(np.random.default_rng(1).choice(60, 30, replace=False)).astype(np.int64) - 10
ROWS = np.random.default_rng(2).standard_normal((30, 4), np.float32)


class FakeServers:
    """Returns constant rows for known ids and first values for others."""

    reached = None

    def look_up(self, asked: Any) -> Any:
        return [self._rows(ids) for _, ids, _ in asked]

    def _rows(self, ids: Any) -> Any:
        wanted = kernels.dedup(ids)
        rows = kernels.first_values(wanted.ids, 4, SEED, HOW)
        places = np.searchsorted(KNOWN, wanted.ids).clip(max=len(KNOWN) - 1)
        known = KNOWN[places] == wanted.ids
        rows[known] = ROWS[places[known]]
        return wanted, rows


def opened(layer: Any) -> Any:
    plan = TablePlan("emb", 4, RulePlan("sgd", {}), InitializerPlan("normal", 0.1, 0.3), 0, 0)
    layer.handle = TableHandle(0, plan, FakeServers())  # type: ignore[arg-type]
    return layer


def both(layer: Any, *args: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = f.FrozenRows(torch.from_numpy(KNOWN), torch.from_numpy(ROWS), SEED, HOW)
    with torch.no_grad():
        return f.frozen(layer, rows)(*args), opened(layer)(*args)


def some(*shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(3).integers(-12, 55, shape))


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("ids", [some(7), some(5, 4), some(2, 3, 4), some(5, 4).int(), some(0, 4)])
def test_frozen_embedding_equals_the_layer(ids: Tensor, padding: int | None) -> None:
    mine, theirs = both(SparseEmbedding(4, padding_idx=padding), ids)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("combiner", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("form", ["2-D", "offsets", "last offset"])
def test_frozen_bag_equals_the_layer(combiner: Any, padding: int | None, form: str) -> None:
    ids, offsets = some(6, 5), None
    # one bag has padding only
    ids[2] = 3
    if form != "2-D":
        # the first and third bags are empty; with offsets, the last one too
        ids, offsets = ids.reshape(-1), torch.tensor([0, 0, 4, 4, 10, 15, 30])
    last = form == "last offset"
    layer = SparseEmbeddingBag(4, combiner, padding_idx=padding, include_last_offset=last)
    mine, theirs = both(layer, ids, offsets)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert len(mine) == (7 if form == "offsets" else 6)


def test_frozen_bag_uses_per_sample_weights() -> None:
    ids = some(6, 5)
    weights = torch.from_numpy(np.random.default_rng(4).standard_normal((6, 5), np.float32))
    mine, theirs = both(SparseEmbeddingBag(4, "sum", padding_idx=3), ids, None, weights)
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_frozen_table_without_rows_returns_first_values() -> None:
    rows = f.FrozenRows(torch.empty(0, dtype=torch.int64), torch.empty(0, 4), SEED, HOW)
    ids = some(9)
    expected = kernels.first_values(ids.numpy(), 4, SEED, HOW)
    assert np.array_equal(rows(ids).numpy(), expected)


def test_frozen_layer_keeps_the_dtype() -> None:
    for layer in (SparseEmbedding(4).double(), SparseEmbeddingBag(4).double()):
        mine, theirs = both(layer, some(3, 2))
        assert mine.dtype == theirs.dtype == torch.float64
