# SPDX-License-Identifier: Apache-2.0
"""fleet.shard in a job: the short last block has its exact weight on every worker."""

import threading
from typing import Any

import pytest
import torch
from tests.workers import run_workers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight.errors import ConfigError, DivergedError

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
    ("count", "batch_norm"), [(26, True), (26, False), (25, False), (28, False), (28, True)]
)
def test_short_blocks_and_repeated_records_change_nothing(count: int, batch_norm: bool) -> None:
    """26 records in blocks of 6 leave 2 for 3 workers: one repeats a record that counts zero."""
    [(plain, _)] = run_workers(train, 1, count, 6, batch_norm)
    results = run_workers(train, 3, count, 6, batch_norm)
    for result, _ in results:
        torch.testing.assert_close(result, plain, rtol=0, atol=1e-11)
    assert sum(sum(counted) for _, counted in results) == 2 * count


def train_chain(count: int, scale: str) -> Any:
    """Two models in sequence, and a penalty on the gradient between them."""
    torch.manual_seed(0)
    first = nn.Linear(4, 6).double()
    second = nn.Sequential(nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.02)
    strategy = fleet.DistributedStrategy(gradient_scale=scale)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    first, second = fleet.distributed_model(first), fleet.distributed_model(second)
    reduction: Any = {"mean": torch.mean, "sum": torch.sum}[scale]
    loader = fleet.shard(DataLoader(records(count), batch_size=6 // fleet.worker_num()))
    for x, y in loader:
        hidden = first(x)
        output = second(hidden)
        loss = reduction(F.cross_entropy(output, y, reduction="none"))
        [slope] = torch.autograd.grad(output.square().sum(), hidden, create_graph=True)
        optimizer.zero_grad()
        (loss + reduction(slope.square().sum(1))).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for m in (first, second) for p in m.parameters()])


@pytest.mark.parametrize(("count", "scale"), [(26, "sum"), (26, "mean"), (13, "mean")])
def test_weight_of_a_batch_counts_once_in_a_chain_of_models(count: int, scale: str) -> None:
    [plain] = run_workers(train_chain, 1, count, scale)
    for result in run_workers(train_chain, 3, count, scale):
        torch.testing.assert_close(result, plain, rtol=0, atol=1e-11)


def files() -> Any:
    with pytest.raises(ConfigError, match="expected a list"):
        fleet.util.get_file_shard("abc")
    return [fleet.util.get_file_shard(list("abcdefg")[:n]) for n in (7, 3, 2)]


def test_files_are_split_among_workers() -> None:
    zero, one, two = run_workers(files, 3)
    assert [zero[0], one[0], two[0]] == [["a", "b", "c"], ["d", "e"], ["f", "g"]]
    assert [zero[1], one[1], two[1]] == [["a"], ["b"], ["c"]]
    assert [zero[2], one[2], two[2]] == [["a"], ["b"], []]


def linear(strategy: dict[str, Any]) -> tuple[Any, Any, nn.Module, torch.optim.Optimizer]:
    """A training loader of 8 steps, a validation loader, a model and its optimizer."""
    model = fleet.distributed_model(nn.Linear(4, 2).double())
    optimizer = fleet.distributed_optimizer(
        torch.optim.SGD(model.parameters(), 0.1), fleet.DistributedStrategy(**strategy)
    )
    workers = fleet.worker_num()
    train = fleet.shard(DataLoader(records(8 * workers), batch_size=1, shuffle=True))
    return train, fleet.shard(DataLoader(records(3 * workers))), model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> None:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def skip_one(strategy: dict[str, Any]) -> str:
    train, _, model, optimizer = linear(strategy)
    try:
        for i, (x, y) in enumerate(train):
            if i == 3 and fleet.worker_index() == 1:
                continue
            step(model, optimizer, x, y)
    except DivergedError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("workers", "strategy", "message"),
    [
        (2, {}, "worker 0 at 8 of epoch 0, worker 1 at 10 of epoch 0"),
        (3, {}, "workers 0, 2 at 12 of epoch 0, worker 1 at 15 of epoch 0"),
        (2, {"shared_memory": False}, "worker 0 at 8 of epoch 0, worker 1 at 10 of epoch 0"),
        (
            2,
            {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
            "worker 0 at 8 of epoch 0, worker 1 at 10 of epoch 0",
        ),
    ],
    ids=["shared_memory", "three", "process_groups", "merged"],
)
def test_batch_skipped_by_one_worker_is_an_error(
    workers: int, strategy: dict[str, Any], message: str
) -> None:
    for text in run_workers(skip_one, workers, strategy):
        assert message in text


def together() -> int:
    """Worker 0 validates alone during the epoch; later a thread prefetches on one worker."""
    train, valid, model, optimizer = linear({})
    steps = 0
    for i, (x, y) in enumerate(train):
        if i == 2 and fleet.is_first_worker():
            for vx, _ in valid:
                model.eval()(vx)
            model.train()
        step(model, optimizer, x, y)
        steps += 1
    iterator = iter(train)
    next(iterator)
    if fleet.worker_index() == 1:
        reader = threading.Thread(target=lambda: next(iterator))
        reader.start()
        reader.join()
    step(model, optimizer, *records(4)[:])
    return steps


def test_loops_of_one_worker_are_no_skipped_batches() -> None:
    assert run_workers(together) == [8, 8]
