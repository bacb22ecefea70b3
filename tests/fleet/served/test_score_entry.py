# SPDX-License-Identifier: Apache-2.0
"""A wide weight for each id, and a vector once its score is high enough."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.served import SYNC, Job, Member
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight.errors import PlanError

STEPS, BATCH, IDS = 10, 12, 60
RANDOM = np.random.default_rng(0)
BATCHES = torch.from_numpy(RANDOM.zipf(1.3, (STEPS, BATCH, 3)) % IDS)
CLICKS = torch.from_numpy((RANDOM.random((STEPS, BATCH)) < 0.3).astype(np.float32))


class WideDeep(nn.Module):
    def __init__(self, score: float = 0.4) -> None:
        super().__init__()
        self.wide = fleet.nn.SparseEmbedding(1, entry=fleet.ShowClickEntry(), optimizer="sgd")
        self.deep = fleet.nn.SparseEmbedding(4, entry=fleet.ScoreEntry(score, "wide"))
        self.linear = nn.Linear(12, 1)

    def forward(self, ids: Tensor, clicks: Tensor) -> Tensor:
        click = clicks[:, None].expand(ids.shape)
        wide = self.wide(ids, show=torch.ones(ids.shape), click=click).sum(1)
        out: Tensor = wide + self.linear(self.deep(ids).flatten(1))
        return out


def trained(workers: int) -> tuple[list[list[set[int]]], Any]:
    """For each table the ids that have a row on each server, and the rows of all ids."""

    def build() -> Any:
        made = WideDeep()
        rest = [*made.deep.parameters(), *made.linear.parameters()]
        groups = [{"params": made.wide.parameters(), "lr": 0.5}, {"params": rest}]
        return made, [torch.optim.Adagrad(groups, lr=0.1)]

    def train(worker: Member) -> Any:
        share = slice(worker.index, None, workers)
        for ids, clicks in zip(BATCHES, CLICKS, strict=True):
            worker.descend(
                nn.functional.binary_cross_entropy_with_logits(
                    worker.model(ids[share], clicks[share])[:, 0], clicks[share]
                )
            )
        worker.barrier()
        return [worker.rows(range(IDS), table) for table in range(2)]

    job = Job(build, SYNC, workers=workers, servers=2)
    rows = job.run(train)[0]
    known: list[list[set[int]]] = [[], []]
    for server in job.servers:
        assert server._service is not None
        for ids, table in zip(known, server._service.state.tables, strict=True):
            ids.append(set(table._rows.ids_of(table._rows.numbers).tolist()))
    return known, rows


def test_the_same_rows_on_one_worker_and_on_three() -> None:
    known, rows = trained(1)
    for wide, deep in zip(*known, strict=True):
        assert deep < wide
        assert len(deep) > 3
    others, its = trained(3)
    assert others == known
    for mine, theirs in zip(rows, its, strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=1e-4, atol=1e-6)


def test_the_other_table_must_count() -> None:
    model = WideDeep()
    model.wide.entry = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PlanError, match="table 'deep': its ScoreEntry names the table 'wide', exp"):
        Job(lambda: (model, [optimizer]), SYNC, workers=1, servers=1)
