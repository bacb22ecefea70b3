# SPDX-License-Identifier: Apache-2.0
"""Collections on a device equal those in main memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ps.layers.collection.tables import dense, opened
from tests.ps.layers.collection.test_embedding_collection import FEATURES, batch
from tests.ps.layers.devices import as_on_a_gpu
from torch import Tensor

from fleetlight.ps.layers.collection.embedding_collection import EmbeddingCollection

POOLED: dict[str, Any] = {
    "user": (3, "people", "sum"),
    "items": (2, None, "mean"),
    "friend": (3, "people", "sum"),
    "tags": (2, None, "max"),
}


def trained(
    features: dict[str, Any], ids: Any, *, weighted: bool, concatenated: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """The results of all features, and the gradients of tables and weights."""
    collection = EmbeddingCollection(features, concatenated=concatenated)
    opened(collection)
    weights = torch.linspace(0.5, 2, len(ids["user"][0])).requires_grad_()
    found: Any = collection(ids, {"user": weights} if weighted else None)
    results = [found] if concatenated else list(found.values())
    for number, result in enumerate(results):
        factor = torch.linspace(1 + number, -2, result.numel()).view(result.shape)
        (result * factor).sum().backward(retain_graph=True)
    gradients = [dense(collection[name].weight) for name in features]
    if weights.grad is not None:
        gradients.append(weights.grad)
    return [one.detach() for one in results], gradients


@settings(max_examples=30)
@given(st.integers(0, 99), st.integers(0, 6), st.booleans())
def test_results_and_gradients_equal_those_of_kernels(
    seed: int, samples: int, weighted: bool
) -> None:
    ids = batch(seed, samples)
    for features, concatenated in ((FEATURES, False), (POOLED, False), (POOLED, True)):
        here = trained(features, ids, weighted=weighted, concatenated=concatenated)
        with pytest.MonkeyPatch.context() as patch:
            late = as_on_a_gpu(patch)
            there = trained(features, ids, weighted=weighted, concatenated=concatenated)
        assert late.started
        torch.testing.assert_close(there, here)


def test_tables_of_one_dim_send_their_gradients_in_one_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = as_on_a_gpu(monkeypatch)
    collection = EmbeddingCollection(dict.fromkeys("abc", (3, None, "sum")))
    opened(collection)
    ids = {name: torch.tensor([[n, 5]]) for n, name in enumerate("abc")}
    sum(result.sum() for result in collection(ids).values()).backward()
    assert (late.started, late.arrived) == (1, 0)
    for n, name in enumerate("abc"):
        assert dense(collection[name].weight).nonzero()[:, 0].unique().tolist() == [n, 5]
