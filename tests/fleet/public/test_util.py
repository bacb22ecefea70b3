# SPDX-License-Identifier: Apache-2.0
"""What workers call together: fleet.util, collectives, fleet.metrics and fleet.shard."""

import contextlib
import io
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.errors import error_text
from tests.workers import descend, run_workers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight.errors import ConfigError, DivergedError
from fleetlight.observe.grouped_evaluation import GroupedMetric

pytestmark = pytest.mark.multiprocess


def helpers() -> Any:
    index = fleet.rank()
    assert (fleet.nranks(), fleet.world_size()) == (2, 2)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        fleet.util.print_on_rank("from worker 1", 1)
        fleet.util.print_on_rank("from worker 0", rank_id=0)
    fleet.util.barrier()
    fleet.util.barrier("worker")
    return (
        fleet.util.all_reduce(np.array([index, 5]), "max").tolist(),
        fleet.util.all_reduce([1, index], mode="sum", comm_world="worker").tolist(),
        fleet.util.all_gather(index, "worker"),
        fleet.util.all_reduce(torch.ones(2)).tolist(),
        shown.getvalue(),
    )


def test_operations_have_the_signatures_of_paddle_fleet() -> None:
    zero, one = run_workers(helpers)
    assert zero[:4] == one[:4] == ([1, 5], [2, 1], [0, 1], [2.0, 2.0])
    assert (zero[4], one[4]) == ("from worker 0\n", "from worker 1\n")


def refusals() -> list[str]:
    errors = []
    for call in (
        lambda: fleet.util.all_reduce(1, comm_world="server"),
        lambda: fleet.util.barrier("wroker"),
        lambda: fleet.util.print_on_rank("x", 1),
    ):
        errors.append(error_text(ConfigError, call))
    with pytest.raises(AttributeError, match="did you mean 'all_reduce'"):
        _ = fleet.util.allreduce
    return errors


def test_unknown_groups_and_ranks_are_refused() -> None:
    [[world, near, rank]] = run_workers(refusals, 1)
    assert "expected 'worker': servers reply to workers" in world
    assert "did you mean 'worker'" in near
    assert "got rank_id=1, expected a worker, 0 to 0" in rank


# Collectives over values of every kind: exact, type-preserving, unequal kinds refused.

BIG = 2**53 + 1


def kinds() -> Any:
    read_only = np.arange(3)
    read_only.setflags(write=False)
    return (
        [
            fleet.all_reduce(v, "max")
            for v in (np.int64(BIG), np.bool_(True), np.float32(0.1), True)
        ],
        [fleet.all_reduce(v) for v in (np.int32(3), np.int8(100), np.bool_(True), True, BIG, 0.5)],
        [fleet.all_gather(v)[1] for v in (np.uint8(200), np.bool_(False), False, np.float64(2.5))],
        fleet.all_reduce(read_only),
        fleet.all_reduce(torch.arange(6.0).reshape(2, 3).t()),
    )


def test_collectives_return_exact_numbers_of_the_same_type() -> None:
    for largest, total, gathered, array, tensor in run_workers(kinds):
        assert largest == [BIG, True, np.float32(0.1), True]
        assert [type(v) for v in largest] == [np.int64, np.bool_, np.float32, bool]
        # a sum that overflows its type gets a wider one; bools are counted
        assert total == [6, 200, 2, 2, 2 * BIG, 1.0]
        assert [type(v) for v in total[:2]] == [np.int32, np.int64]
        assert gathered == [200, False, False, 2.5]
        assert [type(v) for v in gathered] == [np.uint8, np.bool_, bool, np.float64]
        assert array.tolist() == [0, 2, 4]
        assert torch.equal(tensor, 2 * torch.arange(6.0).reshape(2, 3).t())


def refused(call: Callable[[Any], Any], mine: list[Any]) -> str:
    return error_text(ConfigError, call, mine[fleet.worker_index()])


def unlike() -> Any:
    return [
        refused(fleet.all_reduce, [torch.ones(3), torch.ones(4)]),
        refused(fleet.all_reduce, [1, 1.0]),
        refused(fleet.all_gather, [torch.ones(2), torch.ones(2).double()]),
        refused(fleet.all_reduce, [2**63, 2**63]),
    ]


def test_unlike_values_are_refused_on_every_worker() -> None:
    for shapes, dtypes, gathered, large in run_workers(unlike):
        assert shapes.startswith("all_reduce: worker 0 passed torch.float32 [3], worker 1 passed")
        assert "torch.int64 [], worker 1 passed torch.float64 []" in dtypes
        assert gathered.startswith("all_gather: worker 0 passed torch.float32 [2], worker 1 passed")
        assert "expected an integer of 64 bits" in large


# fleet.metrics in a job: computed over all workers; unequal inputs are refused on each.


def metrics() -> Any:
    index = fleet.worker_index()
    scores, labels = [[0.1, 0.4, 0.35], [0.8]][index], [[0, 0, 1], [1]][index]
    return (
        fleet.metrics.auc(scores, labels),
        fleet.metrics.acc(3 + index, 4),
        fleet.metrics.sum(index + 1),
        fleet.metrics.max(torch.tensor([index, 5])).tolist(),
        fleet.metrics.mae(1.0, 2),
        fleet.metrics.rmse(8.0, 1),
        fleet.metrics.mse(8.0, 1),
    )


def test_metrics_cover_all_workers() -> None:
    for auc, acc, total, largest, mae, rmse, mse in run_workers(metrics):
        assert auc == 0.75
        assert acc == 7 / 8
        assert total == 3
        assert largest == [1, 5]
        assert mae == 0.5
        assert rmse == pytest.approx(8**0.5)
        assert mse == 8


def recommender_metrics() -> Any:
    part = slice(fleet.worker_index(), None, 2)
    scores = torch.tensor([0.9, 0.8, 0.3, 0.6, 0.2, 0.7], requires_grad=True)[part]
    labels = torch.tensor([1, 0, 1, 0, 1, 0])[part]
    groups = torch.tensor([1, 1, 2, 1, 2, 2])[part]
    return (
        fleet.metrics.normalised_entropy(scores, labels),
        fleet.metrics.calibration(scores, labels),
        fleet.metrics.ndcg(scores, labels, groups),
        fleet.metrics.gauc(scores, labels, groups),
    )


def test_recommender_metrics_cover_all_workers() -> None:
    log_loss = -sum(math.log(p) for p in (0.9, 0.2, 0.3, 0.4, 0.2, 0.3))
    # the labels of group 2 in the order of scores: 0, 1, 1
    ndcg = (1 + (1 / math.log2(3) + 1 / 2) / (1 + 1 / math.log2(3))) / 2
    for entropy, calibration, ndcgs, gauc in run_workers(recommender_metrics):
        assert entropy == pytest.approx(log_loss / 6 / math.log(2), rel=1e-6)
        assert calibration == pytest.approx(3.5 / 3, rel=1e-6)
        assert ndcgs == GroupedMetric(pytest.approx(ndcg), 2, 0)
        assert gauc == GroupedMetric(0.5, 2, 0)


def unlike_metrics() -> list[str]:
    errors = []
    for call in (
        lambda: fleet.metrics.sum(torch.ones(*[(2, 3), (3, 2)][fleet.worker_index()])),
        [lambda: fleet.metrics.acc(1, 2), lambda: fleet.metrics.sum([1, 2])][fleet.worker_index()],
    ):
        errors.append(error_text(ConfigError, call))
    return errors


def test_unlike_metrics_are_refused_on_every_worker() -> None:
    for shapes, metrics_ in run_workers(unlike_metrics):
        assert (
            "worker 0 passed torch.float64 [2, 3], worker 1 passed torch.float64 [3, 2]" in shapes
        )
        assert (
            "a metric: worker 0 passed torch.float64 [2], worker 1 passed torch.int64" in metrics_
        )


# fleet.shard in a job: the short last block has its exact weight on every worker.


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
            descend(optimizer, F.cross_entropy(model(x), y))
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
        descend(optimizer, loss + reduction(slope.square().sum(1)))
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
