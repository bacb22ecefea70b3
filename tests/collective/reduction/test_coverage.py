# SPDX-License-Identifier: Apache-2.0
"""Which gradients a codec takes: dense ones of float32 that it is for."""

from __future__ import annotations

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


def test_the_large_dense_ones_of_float32_are_coded() -> None:
    module = model()
    found = coded_in(module, Compression(Int8(), min_size=16))
    assert sorted(found) == ["dense.weight", "last.weight"]
    assert found["last.weight"] is module["last"].weight
    assert coded_in(module, None) == {}


def test_embeddings_say_whether_they_are_sparse() -> None:
    assert sparse_names(model()) == {"sparse.weight", "bag.weight"}
    assert sparse_names(nn.Embedding(3, 2, sparse=True)) == {"weight"}


def test_a_codec_that_covers_nothing_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    warn_of_uncoded(nn.Linear(4, 4), Compression(Int8(), min_size=17))
    warn_of_uncoded(nn.Linear(4, 4), Compression(Int8(), min_size=16))
    assert said == [
        "int8 has no effect: all parameters of the model have one dimension, fewer values than "
        "min_size, or are excluded"
    ]
