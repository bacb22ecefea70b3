# SPDX-License-Identifier: Apache-2.0
"""The timed models match their titles."""

from __future__ import annotations

import pytest
import torch

from benchmarks import models


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [("mlp", 6, 118_282), ("mlp8", 16, 116_874), ("resnet50", 161, 23_528_522)],
)
def test_a_model_has_its_parameters_and_takes_its_batch(
    name: str, tensors: int, parameters: int
) -> None:
    workload = models.WORKLOADS[name]
    model = workload.model()
    assert len(list(model.parameters())) == tensors
    assert sum(p.numel() for p in model.parameters()) == parameters
    (x, y), *_ = workload.batches(1, seed=0)
    with torch.no_grad():
        assert model(x).shape == (workload.batch, models.CLASSES)
    assert y.shape == (workload.batch,)


def test_the_same_seed_gives_the_same_batches() -> None:
    first, again, other = (models.WORKLOADS["mlp8"].batches(2, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))
    assert not torch.equal(first[0][0], other[0][0])
