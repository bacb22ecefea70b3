# SPDX-License-Identifier: Apache-2.0
"""In sync mode any number of workers has the same rows in a table with a maximum of rows."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.served import SYNC, Job, Member, Net, loss_of

STEPS, BATCH, IDS, MAX_ROWS = 12, 12, 200, 80
RANDOM = np.random.default_rng(0)
BATCHES = torch.from_numpy(RANDOM.zipf(1.3, (STEPS, BATCH, 3)) % IDS)
TARGETS = torch.from_numpy(RANDOM.standard_normal((STEPS, BATCH, 1), np.float32))


def trained(workers: int, **layer: Any) -> tuple[list[set[int]], Any]:
    """The ids that have a row on each server, and the rows of all ids."""

    def build() -> Any:
        made = Net(**layer)
        return made, [torch.optim.Adagrad(made.parameters(), lr=0.1)]

    def train(worker: Member) -> Any:
        share = slice(worker.index, None, workers)
        for ids, targets in zip(BATCHES, TARGETS, strict=True):
            worker.descend(loss_of(worker.model, ids[share], targets[share]))
        worker.barrier()
        return worker.rows(range(IDS))

    job = Job(build, SYNC, workers=workers, servers=2)
    rows = job.run(train)[0]
    known = []
    for server in job.servers:
        assert server._service is not None
        table = server._service.state.tables[0]._rows
        known.append(set(table.ids_of(table.numbers).tolist()))
    return known, rows


@pytest.mark.parametrize("layer", [{}, {"evict": "count"}, {"memory": 1}])
def test_the_same_rows_on_one_worker_and_on_three(layer: dict[str, Any]) -> None:
    known, rows = trained(1, max_rows=MAX_ROWS, **layer)
    assert len(set(BATCHES.flatten().tolist())) > MAX_ROWS
    assert 0.7 * MAX_ROWS < sum(map(len, known)) <= MAX_ROWS
    others, its = trained(3, max_rows=MAX_ROWS, **layer)
    assert others == known
    np.testing.assert_allclose(its, rows, rtol=1e-4, atol=1e-6)
