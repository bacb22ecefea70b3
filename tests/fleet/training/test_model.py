# SPDX-License-Identifier: Apache-2.0
"""The log lines at the start of training."""

from typing import Any

import pytest
import torch
from tests.served import Member, Net, geo, run
from tests.workers import run_workers
from torch import nn

import fleetlight as fleet
from fleetlight.fleet.training.model import untrained
from fleetlight.observe.log import logger

SGD = torch.optim.SGD


def test_parameters_in_no_optimizer_are_found() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    optimizer = SGD(model[1].parameters(), 0.1)
    assert untrained(model, [optimizer]) == ["0.weight"]
    assert untrained(model, [optimizer, SGD([model[0].weight], 0.1)]) == []
    # a script that only evaluates has no optimizer
    assert untrained(model, []) == []


def lines_of(trained: Any, **settings: Any) -> list[str]:
    """The log lines of a worker that begins to train."""
    lines: list[str] = []
    logger.addFilter(lambda record: lines.append(record.getMessage()) or True)
    model = fleet.distributed_model(trained())
    strategy = fleet.DistributedStrategy(**settings)
    optimizer = fleet.distributed_optimizer(SGD(list(model.parameters())[1:], 0.1), strategy)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return [line for line in lines if "in no optimizer" in line or "batch norm" in line]


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3))


@pytest.mark.multiprocess
def test_worker_0_logs_untrained_parameters_and_local_norms() -> None:
    zero, one = run_workers(lines_of, 2, norms)
    assert [line.partition(":")[0] for line in zero] == ["0.weight", "batch norm"]
    assert "2 layers use the statistics of their own" in zero[1]
    assert "strategy.sync_batch_norm = True" in zero[1]
    assert one == []


def evaluated_first(in_parts: bool) -> list[str]:
    lines: list[str] = []
    logger.addFilter(lambda record: lines.append(record.getMessage()) or True)
    model = fleet.distributed_model(norms().eval())
    optimizer = fleet.distributed_optimizer(SGD(model.parameters(), 0.1))
    model(torch.ones(2, 3))
    before = sum("batch norm" in line for line in lines)
    for _ in range(2):
        model.train()
        step = nn.Sequential(*model) if in_parts else model
        step(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return [f"{before} before", *(line for line in lines if "batch norm" in line)]


@pytest.mark.multiprocess
@pytest.mark.parametrize("in_parts", [True, False])
def test_local_norms_are_logged_at_their_first_training_forward(in_parts: bool) -> None:
    (before, *notes), one = run_workers(evaluated_first, 2, in_parts)
    assert before == one[0] == "0 before"
    assert len(notes) == 1
    assert "2 layers use the statistics of their own" in notes[0]
    assert one[1:] == []


def lines_synced() -> list[str]:
    return lines_of(norms, sync_batch_norm=True)


def alone() -> list[str]:
    return lines_of(norms)


@pytest.mark.multiprocess
def test_synced_norms_and_single_workers_are_not_logged() -> None:
    assert all("batch norm" not in line for line in run_workers(lines_synced)[0])
    [lines] = run_workers(alone, 1)
    assert [line.partition(":")[0] for line in lines] == ["0.weight"]


@pytest.mark.parametrize(
    ("make", "mode", "warns"),
    [
        (lambda p: SGD(p, 0.1), geo(2), False),
        (lambda p: SGD(p, 0.1, momentum=0.9), geo(2), True),
        (lambda p: torch.optim.Adam(p), geo(2), True),
        (lambda p: torch.optim.Adam(p), {"a_sync": True}, False),
    ],
)
def test_geo_with_optimizer_state_of_dense_parameters_warns(
    make: Any, mode: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def build() -> Any:
        model = Net()
        return model, [make(model.linear.parameters()), SGD(model.emb.parameters(), 0.1)]

    def train(worker: Member) -> None:
        worker.model(torch.tensor([[1, 2, 3]]))

    with caplog.at_level("WARNING", "fleetlight"):
        run(build, train, mode)
    assert ("steps dense parameters, and each worker keeps" in caplog.text) is warns
