# SPDX-License-Identifier: Apache-2.0
"""Which gradients a codec covers: dense float32 ones of covered parameters."""

import pytest
import torch
from torch import nn

from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.codecs.forms.int8 import Int8
from fleetlight.collective.reduction.coverage import coded_in, sparse_names, warn_of_uncoded
from fleetlight.observe.log import logger


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


def test_large_dense_float32_gradients_are_coded() -> None:
    module = model()
    found = coded_in(module, Compression(Int8(), min_size=16))
    assert sorted(found) == ["dense.weight", "last.weight"]
    assert found["last.weight"] is module["last"].weight
    assert coded_in(module, None) == {}


def test_sparse_embeddings_are_found() -> None:
    assert sparse_names(model()) == {"sparse.weight", "bag.weight"}
    assert sparse_names(nn.Embedding(3, 2, sparse=True)) == {"weight"}


def test_a_codec_that_covers_nothing_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: warnings.append(text % values))
    warn_of_uncoded(nn.Linear(4, 4), Compression(Int8(), min_size=17))
    warn_of_uncoded(nn.Linear(4, 4), Compression(Int8(), min_size=16))
    assert warnings == [
        "int8 has no effect: all parameters of the model have one dimension, fewer values than "
        "min_size, or are excluded"
    ]
