# SPDX-License-Identifier: Apache-2.0
"""Workers with different settings get an error at the first step or where they diverge."""

from typing import Any

import pytest
import torch
from tests.errors import error_text
from tests.workers import run_workers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight.errors import DeadlineError, DivergedError, PlanError
from fleetlight.fleet.job import current

pytestmark = pytest.mark.multiprocess


def records(count: int) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def started(strategy: dict[str, Any], count: int = 48, **loader: Any) -> tuple[nn.Module, Any, Any]:
    """A model, its optimizer and its loader."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model = fleet.distributed_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy(**strategy))
    return model, optimizer, fleet.shard(DataLoader(records(count), **{"batch_size": 4, **loader}))


def begin(strategies: list[dict[str, Any]], loaders: list[dict[str, Any]]) -> str:
    me = fleet.worker_index()
    model, _, _ = started(strategies[me], **loaders[me])
    return error_text(PlanError, model, torch.ones(2, 4))


@pytest.mark.parametrize(
    ("strategies", "loaders", "message"),
    [
        ([{"fp16_allreduce": "bf16"}, {}], [{}, {}], "strategy.fp16_allreduce is 'bf16' on "),
        (
            [{}, {}],
            [{}, {"batch_size": 6}],
            "batch_size of sharded loader 0 is 4 on worker 0, but ",
        ),
        ([{}, {}], [{}, {"count": 47}], "records of sharded loader 0 is 48 on worker 0, but 47 on"),
        (
            [{}, {}],
            [{"shuffle": True}, {}],
            "loader 0 is 'RandomSampler' on worker 0, but 'Sequent",
        ),
    ],
    ids=["strategy", "batch_size", "length", "shuffle"],
)
def test_settings_are_compared_before_the_first_forward(
    strategies: list[dict[str, Any]], loaders: list[dict[str, Any]], message: str
) -> None:
    for text in run_workers(begin, 2, strategies, loaders):
        assert message in text


def diverge(what: str, strategy: dict[str, Any]) -> str:
    model, optimizer, loader = started(strategy)
    try:
        for number, (x, y) in enumerate(loader):
            is_odd = number == 2 and fleet.worker_index() == 1
            if is_odd and what == "rate":
                optimizer.param_groups[0]["lr"] = 0.05
            F.cross_entropy(model(x), y).backward()
            if not is_odd or what != "step":
                optimizer.step()
            optimizer.zero_grad()
    except DivergedError as error:
        return f"{current().step}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("what", "strategy", "message"),
    [
        ("rate", {}, "2: the workers no longer train alike: lr of group 0 of optimizer 0 is 0.1"),
        ("rate", {"shared_memory": False}, "lr of group 0 of optimizer 0 is 0.1 on worker 0, but"),
        ("step", {}, "the number of optimizer steps is 3 on worker 0, but 2 on worker 1"),
    ],
    ids=["rate", "process_groups", "step"],
)
def test_settings_are_compared_at_every_step(
    what: str, strategy: dict[str, Any], message: str
) -> None:
    for text in run_workers(diverge, 2, what, strategy):
        assert message in text


@torch.no_grad()
def evaluates_alone() -> str:
    model, _, _ = started({})
    other = current().group.assemble
    with pytest.raises(DeadlineError) as caught:
        model(torch.ones(2, 4)) if fleet.is_first_worker() else other("what another worker does")
    return str(caught.value)


def test_error_for_a_first_forward_of_one_worker_names_the_remedy() -> None:
    text, _ = run_workers(evaluates_alone, 2, deadline_s=3.0)
    assert "let all call fleet.init_worker() first" in text
