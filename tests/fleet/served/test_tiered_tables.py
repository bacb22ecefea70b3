# SPDX-License-Identifier: Apache-2.0
"""Jobs whose servers have few rows in memory train as jobs with all rows there."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.served import ASYNC, SYNC, Job, Member, Net, loss_of
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight.kernels import RowTable, TieredRowTable
from fleetlight.ps.layers.collection.embedding_collection import (
    EmbeddingCollection,
    EmbeddingFeature,
)

STEPS, IDS = 8, 150
RANDOM = np.random.default_rng(0)
BATCHES = torch.from_numpy(RANDOM.integers(0, IDS, (STEPS, 2, 12, 3)))
TARGETS = torch.from_numpy(RANDOM.standard_normal((STEPS, 2, 12, 1), np.float32))
#: a server has at least 16 rows in memory
MEMORY = "1B"
MODES: dict[str, tuple[dict[str, Any], int]] = {
    "sync": (SYNC, 2),
    "async": (ASYNC, 1),
    "a staleness": ({"a_sync": True, "a_sync_configs": {"staleness": 2}}, 1),
}  # not GeoSGD: when its exchanges end depends on time


class Many(nn.Module):
    """A collection with a table that has a limit and one that has none."""

    def __init__(self, **layer: Any) -> None:
        super().__init__()
        one = EmbeddingFeature(4, "one", dtype="bf16", entry=fleet.CountFilterEntry(2), **layer)
        self.emb = EmbeddingCollection({"a": one, "b": (4, "two"), "c": one}, concatenated=True)
        self.linear = nn.Linear(12, 1)

    def forward(self, ids: Tensor) -> Tensor:
        given = {name: ids[:, n : n + 1] for n, name in enumerate("abc")}
        out: Tensor = self.linear(self.emb(given))
        return out


def trained(model: Callable[..., nn.Module], mode: str, **layer: Any) -> tuple[Any, Job]:
    strategy, workers = MODES[mode]

    def build() -> Any:
        made = model(**layer)
        return made, [torch.optim.Adagrad(made.parameters(), lr=0.1)]

    def train(worker: Member) -> Any:
        losses = []
        for t in range(STEPS):
            loss = loss_of(worker.model, BATCHES[t, worker.index], TARGETS[t, worker.index])
            worker.descend(loss)
            losses.append(float(loss.detach()))
        worker.barrier()
        tables = range(len(worker.session.bound.plan.tables))
        return losses, [worker.rows(range(IDS), table).tolist() for table in tables]

    job = Job(build, strategy, workers=workers, servers=2)
    return job.run(train), job


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", [Many, Net])
def test_training_equals_that_in_memory(model: Callable[..., nn.Module], mode: str) -> None:
    expected, _ = trained(model, mode)
    found, job = trained(model, mode, memory=MEMORY)
    assert found == expected
    for server in job.servers:
        assert server._service is not None
        first, *others = (table._rows for table in server._service.state.tables)
        assert isinstance(first, TieredRowTable)
        assert len(first) > 2 * len(first._slots)
        assert all(type(other) is RowTable for other in others)
