# SPDX-License-Identifier: Apache-2.0
"""Which gradients a codec takes: dense ones of float32 that it is for."""

from __future__ import annotations

import torch
from torch import nn

from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.codecs.int8 import Int8
from fleetlight.collective.coded import coded_in, sparse_names


def model() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "sparse": nn.Embedding(8, 4, sparse=True),
            "bag": nn.EmbeddingBag(8, 4, sparse=True),
            "dense": nn.Embedding(8, 4),
            "wide": nn.Linear(4, 4, dtype=torch.float64),
            "small": nn.Linear(2, 2),
            "last": nn.Linear(4, 4),
        }
    )


def test_the_large_dense_ones_of_float32_are_coded() -> None:
    module = model()
    found = coded_in(module, Compression(Int8(), min_size=16))
    assert sorted(found) == ["dense.weight", "last.weight"]
    assert found["last.weight"] is module["last"].weight
    assert coded_in(module, None) == {}


def test_embeddings_say_whether_they_are_sparse() -> None:
    assert sparse_names(model()) == {"sparse.weight", "bag.weight"}
    assert sparse_names(nn.Embedding(3, 2, sparse=True)) == {"weight"}
