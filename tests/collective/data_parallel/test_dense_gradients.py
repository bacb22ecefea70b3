# SPDX-License-Identifier: Apache-2.0
"""A dense gradient of a sparse embedding is an error that names the embedding."""

from typing import Any

import pytest
import torch
from tests.workers import run_workers
from torch import nn

import fleetlight as fleet
from fleetlight.errors import PlanError


def penalise_a_whole_weight() -> tuple[str, list[float]]:
    torch.manual_seed(0)
    plan = nn.ModuleDict({"emb": nn.Embedding(6, 3, sparse=True), "head": nn.Linear(3, 1)})
    model: Any = fleet.distributed_model(_Model(plan))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    ids = torch.arange(4)
    model(ids).sum().backward()
    # without a reduction in this backward, torch's reducer expects no layout
    model.parts["emb"].weight.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    values = model.parts["emb"].weight.flatten().tolist()
    with pytest.raises(PlanError) as refused:
        (model(ids).sum() + model.parts["emb"].weight.square().sum()).backward()
    return str(refused.value), values


class _Model(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, ids: torch.Tensor) -> Any:
        return self.parts["head"](self.parts["emb"](ids))


@pytest.mark.multiprocess
def test_a_penalty_on_a_whole_sparse_weight_is_named() -> None:
    (text, values), other = run_workers(penalise_a_whole_weight)
    assert "parts.emb.weight got a dense gradient" in text
    assert "fleet.rows(parts.emb, ids)" in text
    assert "sparse=False" in text
    assert (text, values) == other
