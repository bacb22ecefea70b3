# SPDX-License-Identifier: Apache-2.0
"""fleet.shard in a job: the last, short block weighs as it should, whoever has a part of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.workers import run_workers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight.errors import ConfigError

pytestmark = pytest.mark.multiprocess


def records(count: int) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0)).double()
    return TensorDataset(x, (x.sum(1) > 0).long())


def train(count: int, global_batch: int, batch_norm: bool) -> Any:
    torch.manual_seed(0)
    middle: list[nn.Module] = [nn.BatchNorm1d(6)] if batch_norm else []
    model = nn.Sequential(nn.Linear(4, 6), *middle, nn.Tanh(), nn.Linear(6, 2)).double()
    strategy = fleet.DistributedStrategy(sync_batch_norm=batch_norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    model = fleet.distributed_model(model)
    batch = global_batch // fleet.worker_num()
    loader = fleet.shard(DataLoader(records(count), batch_size=batch, shuffle=True))
    counted = []
    for _ in range(2):
        for x, y in loader:
            counted.append(loader.counted)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), counted


@pytest.mark.parametrize(
    ("count", "batch_norm"), [(26, False), (26, True), (25, False), (28, False), (28, True)]
)
def test_short_blocks_and_fillers_change_nothing(count: int, batch_norm: bool) -> None:
    """26 records in blocks of 6 leave 2 for 3 workers: one repeats a record that does not count."""
    [(plain, _)] = run_workers(train, 1, count, 6, batch_norm)
    results = run_workers(train, 3, count, 6, batch_norm)
    for result, _ in results:
        torch.testing.assert_close(result, plain, rtol=0, atol=1e-11)
    assert sum(sum(counted) for _, counted in results) == 2 * count


def files() -> Any:
    with pytest.raises(ConfigError, match="expected a list"):
        fleet.util.get_file_shard("abc")
    return [fleet.util.get_file_shard(list("abcdefg")[:n]) for n in (7, 3, 2)]


def test_files_are_dealt_out() -> None:
    zero, one, two = run_workers(files, 3)
    assert [zero[0], one[0], two[0]] == [["a", "b", "c"], ["d", "e"], ["f", "g"]]
    assert [zero[1], one[1], two[1]] == [["a"], ["b"], ["c"]]
    assert [zero[2], one[2], two[2]] == [["a"], ["b"], []]


def metrics() -> Any:
    index = fleet.worker_index()
    scores = [[0.1, 0.4, 0.35], [0.8]][index]
    labels = [[0, 0, 1], [1]][index]
    return (
        fleet.metrics.auc(scores, labels),
        fleet.metrics.acc(3 + index, 4),
        fleet.metrics.sum(index + 1),
        fleet.metrics.max(torch.tensor([index, 5])).tolist(),
        fleet.metrics.mae(1.0, 2),
        fleet.metrics.rmse(8.0, 1),
    )


def test_metrics_are_global() -> None:
    for auc, acc, total, largest, mae, rmse in run_workers(metrics):
        assert auc == 0.75
        assert acc == 7 / 8
        assert total == 3
        assert largest == [1, 5]
        assert mae == 0.5
        assert rmse == pytest.approx(8**0.5)
