# SPDX-License-Identifier: Apache-2.0
"""A sparse embedding shares its weight with its like only; found when a model is registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.workers import run_workers
from torch import nn

import fleetlight as fleet
from fleetlight.errors import PlanError
from fleetlight.fleet.plan.tied_weights import refuse_tied


class Tied(nn.Module):
    """An embedding whose weight the last layer has, too."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.emb = embedding
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = embedding.weight


@pytest.mark.parametrize("served", [True, False])
def test_a_sparse_weight_that_a_dense_layer_has_is_named(served: bool) -> None:
    with pytest.raises(
        PlanError, match=r"emb: .*head \(Linear\) uses its weight too.*sparse=False"
    ):
        refuse_tied(Tied(nn.Embedding(5, 4, sparse=True)), served=served)


def test_a_sparse_embedding_points_to_rows() -> None:
    with pytest.raises(PlanError, match=r"emb: .*fleet\.rows\(emb, ids\)"):
        refuse_tied(Tied(fleet.nn.SparseEmbedding(4)), served=True)


def test_dense_weights_and_sparse_ones_among_themselves_are_taken() -> None:
    refuse_tied(Tied(nn.Embedding(5, 4)), served=True)
    one, other = nn.Embedding(5, 4, sparse=True), nn.EmbeddingBag(5, 4, sparse=True)
    other.weight = one.weight
    refuse_tied(nn.ModuleList([one, other]), served=False)


def _register_tied() -> str:
    with pytest.raises(PlanError, match="has sparse gradients") as caught:
        fleet.distributed_model(Tied(nn.Embedding(5, 4, sparse=True)))
    return str(caught.value)


def _train_shared() -> list[float]:
    """Two sparse embeddings of one weight train as in one process."""
    model: Any = nn.ModuleList([nn.Embedding(5, 2, sparse=True) for _ in range(2)])
    model[1].weight = model[0].weight
    nn.init.ones_(model[0].weight)
    ids = torch.tensor([fleet.worker_index()])
    model.forward = lambda: (model[0](ids) + 2 * model[1](ids)).sum()
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    model().backward()
    optimizer.step()
    return [float(v) for v in model[0].weight[:, 0]]


def test_workers_refuse_it_before_they_train() -> None:
    assert len(run_workers(_register_tied)) == 2


def test_workers_train_two_sparse_embeddings_of_one_weight() -> None:
    for weight in run_workers(_train_shared):
        assert weight == [1 - 1.5, 1 - 1.5, 1, 1, 1]
