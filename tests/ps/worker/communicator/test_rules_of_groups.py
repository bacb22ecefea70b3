# SPDX-License-Identifier: Apache-2.0
"""Each rule trains in a job as its optimizer does alone, with the options of each param group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.served import ASYNC, SYNC, Member, batches, geo, loss_of, run, started
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight.kernels import RULES
from fleetlight.ps.layers.embedding import SparseEmbedding

ROWS, DIM, STEPS = 12, 4, 12
TABLES = ("first", "second")
Make = Callable[[Any], torch.optim.Optimizer]


class TwoTables(nn.Module):
    """Two tables in param groups of their own; `moved`: torch's layers."""

    def __init__(self, moved: bool = False) -> None:
        super().__init__()
        for name in TABLES:
            layer = nn.Embedding(ROWS, DIM) if moved else SparseEmbedding(DIM)
            self.add_module(name, layer)
        self.linear = nn.Linear(6 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        both = [self.get_submodule(name)(ids) for name in TABLES]
        out: Tensor = self.linear(torch.cat(both, -1).flatten(1))
        return out


def groups_of(model: nn.Module, first: dict[str, Any], second: dict[str, Any]) -> Any:
    options = dict(zip((*TABLES, "linear"), (first, second, {}), strict=True))
    return [
        {"params": model.get_submodule(name).parameters(), **one} for name, one in options.items()
    ]


#: the options of the first and of the second table
DECAY = {"lr": 0.05, "weight_decay": 0.02}, {"lr": 0.01, "weight_decay": 0.5}
FTRL = {"lr": 0.2, "l1": 0.001, "l2": 0.01}, {"lr": 0.05, "beta": 0.1, "l2": 1.0}
CASES: dict[str, tuple[Make, Any]] = {
    "sgd": (lambda groups: torch.optim.SGD(groups, 0.1), DECAY),
    "momentum": (lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9), DECAY),
    # the rule adds eps where SparseAdam does, so eps must not matter
    "adam": (lambda groups: torch.optim.Adam(groups, 0.01, eps=1e-12), DECAY),
    "adamw": (lambda groups: torch.optim.AdamW(groups, 0.01, eps=1e-5), DECAY),
    "rowwise_adam": (lambda groups: fleet.optim.RowwiseAdam(groups, 0.01, eps=1e-5), DECAY),
    "ftrl": (lambda groups: fleet.optim.Ftrl(groups, 0.1), FTRL),
    "adagrad": (lambda groups: torch.optim.Adagrad(groups, 0.05), DECAY),
    "rowwise_adagrad": (lambda groups: fleet.optim.RowwiseAdagrad(groups, 0.05), DECAY),
}


def every_row(ids: Tensor) -> Tensor:
    """Ids of which each batch has every row: decay then acts on all rows, as in dense training."""
    ids[:, :, :4] = torch.arange(ROWS).view(4, 3)
    return ids


def build_of(name: str) -> Callable[[], Any]:
    make, options = CASES[name]

    def build() -> Any:
        model = TwoTables()
        return model, [make(groups_of(model, *options))]

    return build


def alone(name: str, ids: Tensor, targets: Tensor) -> list[Tensor]:
    """The values after training dense parameters in plain torch."""
    torch.manual_seed(0)
    model = TwoTables(moved=True)
    with torch.no_grad():
        for table in TABLES:
            model.get_parameter(f"{table}.weight").copy_(started(ROWS, DIM, table))
    make, options = CASES[name]
    # the layers of torch have drawn random numbers before the linear one
    torch.manual_seed(0)
    model.linear = nn.Linear(6 * DIM, 1)
    optimizer = make(groups_of(model, *options))
    for t in range(len(ids)):
        optimizer.zero_grad()
        loss_of(model, ids[t].flatten(0, 1), targets[t].flatten(0, 1)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train_on(ids: Tensor, targets: Tensor) -> Callable[[Member], list[Tensor]]:
    def train(worker: Member) -> list[Tensor]:
        strategy = worker.context.strategy
        for t in range(len(ids)):
            worker.optimizer.zero_grad()
            loss_of(worker.model, ids[t, worker.index], targets[t, worker.index]).backward()
            worker.optimizer.step()
            if strategy.a_sync and not strategy.a_sync_configs.k_steps:
                # without staleness
                worker.barrier()
        worker.barrier()
        rows = [torch.from_numpy(worker.rows(range(ROWS), number)) for number in range(2)]
        linear = worker.model.get_submodule("linear")
        return [*rows, *(p.detach().clone() for p in linear.parameters())]

    return train


def test_each_rule_of_an_optimizer_is_tested() -> None:
    assert set(CASES) == {name for name, rule in RULES.items() if rule.optimizers}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_sync_training_equals_one_process(name: str) -> None:
    ids, targets = batches(STEPS, 2, ids=ROWS)
    expected = alone(name, every_row(ids), targets)
    for found in run(build_of(name), train_on(ids, targets), SYNC, servers=2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [ASYNC, geo(3)], ids=["async", "geo"])
@pytest.mark.parametrize("name", ["adamw", "rowwise_adam", "ftrl"])
def test_a_single_worker_equals_one_process_in_other_modes(name: str, mode: Any) -> None:
    ids, targets = batches(STEPS, 1, ids=ROWS)
    expected = alone(name, every_row(ids), targets)
    [found] = run(build_of(name), train_on(ids, targets), mode, workers=1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_decay_acts_on_the_rows_of_a_push_only() -> None:
    def build() -> Any:
        model = TwoTables()
        return model, [torch.optim.AdamW(model.parameters(), 0.1, weight_decay=5.0)]

    def train(worker: Member) -> Tensor:
        worker.model(torch.arange(6).view(2, 3)).sum().backward()
        worker.optimizer.step()
        worker.optimizer.zero_grad()
        before = worker.rows(range(6))
        (worker.model(torch.arange(3)[None]) * 0).sum().backward()
        worker.optimizer.step()
        worker.barrier()
        return torch.from_numpy(worker.rows(range(6)) != before).any(1)

    [moved] = run(build, train, SYNC, workers=1)
    assert moved.tolist() == [True] * 3 + [False] * 3
