# SPDX-License-Identifier: Apache-2.0
"""Tied weights: a sparse embedding may share its weight only with sparse embeddings."""

from typing import Any

import pytest
import torch
from tests.workers import run_workers
from torch import nn

import fleetlight as fleet
from fleetlight.errors import PlanError
from fleetlight.fleet.plan.tied_weights import refuse_tied


class Tied(nn.Module):
    """An embedding that shares its weight with the last layer."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.emb = embedding
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = embedding.weight


@pytest.mark.parametrize("served", [True, False])
def test_sparse_weight_shared_with_a_dense_layer_is_named(served: bool) -> None:
    with pytest.raises(
        PlanError, match=r"emb: .*head \(Linear\) uses its weight too.*sparse=False"
    ):
        refuse_tied(Tied(nn.Embedding(5, 4, sparse=True)), served=served)


def test_error_for_a_sparse_embedding_names_fleet_rows() -> None:
    with pytest.raises(PlanError, match=r"emb: .*fleet\.rows\(emb, ids\)"):
        refuse_tied(Tied(fleet.nn.SparseEmbedding(4)), served=True)


def test_ties_among_dense_or_among_sparse_layers_are_accepted() -> None:
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


@pytest.mark.multiprocess
def test_workers_refuse_mixed_ties_before_training() -> None:
    assert len(run_workers(_register_tied)) == 2


@pytest.mark.multiprocess
def test_two_sparse_embeddings_train_one_weight() -> None:
    for weight in run_workers(_train_shared):
        assert weight == [1 - 1.5, 1 - 1.5, 1, 1, 1]
