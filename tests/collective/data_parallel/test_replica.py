# SPDX-License-Identifier: Apache-2.0
"""N workers train as one process on the whole batch; otherwise an error says why."""

import copy
import io
import logging
import os
import pickle
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.collective.routes.test_exchange import hellos
from tests.workers import WorkerFailedError, descend, run_workers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight.collective.codecs.compression import Compression
from fleetlight.collective.codecs.forms.int8 import Int8
from fleetlight.collective.data_parallel.replica import Reduction
from fleetlight.errors import PlanError

pytestmark = pytest.mark.multiprocess

SAMPLES, FEATURES, CLASSES = 24, 6, 3


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("hosts", "backend", "shared", "narrow", "coded"),
    [
        ([0, 0], "gloo", True, False, False),
        ([0, 0], "nccl", True, True, False),
        ([0, 0], "gloo", False, True, True),
        ([0, 1], "nccl", True, True, True),
    ],
    ids=["memory", "gpus", "no_memory", "hosts"],
)
def test_the_gradient_codec_depends_on_where_workers_run(
    hosts: list[int], backend: str, shared: bool, narrow: bool, coded: bool
) -> None:
    group: Any = SimpleNamespace(hellos=hellos(hosts), backend=backend)
    compression = Compression(Int8())
    configured = Reduction(narrow=torch.bfloat16, compression=compression, shared_memory=shared)
    found = configured.within(group)
    assert found.narrow is (torch.bfloat16 if narrow else None)
    assert found.compression is (compression if coded else None)


def data(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=dtype)
    return x, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def mlp(seed: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)).to(dtype)


def my_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(fleet.worker_num())[fleet.worker_index()]


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def plain(steps: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The same training in one process on the whole batch."""
    model = mlp(0, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = data(dtype)
    for _ in range(steps):
        descend(optimizer, scale * F.cross_entropy(model(x), y))
    return flat(model)


def train(strategy: dict[str, Any], steps: int, dtype: torch.dtype = torch.float64) -> Any:
    # only worker 0 starts from the right values
    model = mlp(fleet.worker_index(), dtype)
    strategy_ = fleet.DistributedStrategy(**strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = fleet.distributed_optimizer(optimizer, strategy_)
    model = fleet.distributed_model(model)
    x, y = data(dtype)
    for _ in range(steps):
        descend(optimizer, F.cross_entropy(model(my_part(x)), my_part(y)))
    return flat(model)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str
)
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_equal_one_process(workers: int, dtype: torch.dtype, tolerance: float) -> None:
    for result in run_workers(train, workers, {}, 20, dtype):
        torch.testing.assert_close(result, plain(20, dtype=dtype), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "strategy",
    [
        {"nccl_comm_num": 2, "fuse_all_reduce_ops": False, "shared_memory": False},
        {"shared_memory": False},
        {"fuse_all_reduce_ops": False},
        {"fuse_all_reduce_ops": False, "shared_memory": False},
        {"fuse_grad_size_in_num": 1},
        {"fuse_grad_size_in_MB": 0.0001},
        {"sync_nccl_allreduce": True},
        {"sync_nccl_allreduce": True, "shared_memory": False},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
def test_settings_of_the_reduction_do_not_change_results(strategy: dict[str, Any]) -> None:
    for result in run_workers(train, 2, strategy, 5):
        torch.testing.assert_close(result, plain(5), rtol=0, atol=1e-12)


def test_gradient_scale_sum_sums_gradients() -> None:
    for result in run_workers(train, 2, {"gradient_scale": "sum"}, 5):
        torch.testing.assert_close(result, plain(5, scale=2.0), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("narrow", "tolerance"),
    [({"fp16_allreduce": True}, 1e-3), ({"compression": "bf16"}, 1e-2)],
    ids=["fp16_allreduce", "compression"],
)
def test_narrow_gradients_are_nearly_equal(narrow: dict[str, Any], tolerance: float) -> None:
    results = run_workers(train, 2, {"shared_memory": False, **narrow}, 5)
    exact = plain(5)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    torch.testing.assert_close(results[0], exact, rtol=0, atol=tolerance)
    assert (results[0] - exact).abs().max() > 1e-9


def test_gradients_in_shared_memory_are_not_narrowed() -> None:
    for result in run_workers(train, 2, {"fp16_allreduce": True}, 5):
        torch.testing.assert_close(result, plain(5), rtol=0, atol=1e-12)


def accumulate() -> Any:
    model = fleet.distributed_model(mlp(0))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = my_part(data()[0]), my_part(data()[1])
    with fleet.no_sync():
        (F.cross_entropy(model(x[::2]), y[::2]) / 2).backward()
    local = model[0].weight.grad.clone()
    (F.cross_entropy(model(x[1::2]), y[1::2]) / 2).backward()
    optimizer.step()
    return local, flat(model)


def one_sgd_step() -> torch.Tensor:
    model = mlp(0)
    x, y = data()
    F.cross_entropy(model(x), y).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return flat(model)


def test_no_sync_accumulates_without_communication() -> None:
    (local0, end0), (local1, end1) = run_workers(accumulate)
    assert not torch.allclose(local0, local1)
    torch.testing.assert_close(end0, one_sgd_step(), rtol=0, atol=1e-12)
    torch.testing.assert_close(end1, one_sgd_step(), rtol=0, atol=1e-12)


def reduce_late() -> Any:
    model = fleet.distributed_model(mlp(0))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        model(data()[0][:1])
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fleetlight").addHandler(handler)
    optimizer.zero_grad()
    # bypasses the forward of the whole module
    hidden = model[1](model[0](my_part(data()[0])))
    F.cross_entropy(model[2](hidden), my_part(data()[1])).backward()
    optimizer.step()
    return flat(model), records


def test_gradients_of_a_bypassed_model_are_reduced_before_the_step() -> None:
    for end, records in run_workers(reduce_late):
        torch.testing.assert_close(end, one_sgd_step(), rtol=0, atol=1e-12)
        assert any("reducing them before the step" in text for text in records)


class Branches(nn.Module):
    """A model whose forward uses one of its two branches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Linear(FEATURES, CLASSES).double()
        self.right = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        result: torch.Tensor = self.left(x) if left else self.right(x)
        return result


def train_branches(find_unused: bool, same: bool) -> Any:
    strategy = fleet.DistributedStrategy(find_unused_parameters=find_unused)
    model = fleet.distributed_model(Branches())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), strategy)
    x, y = my_part(data()[0]), my_part(data()[1])
    for step in range(4):
        optimizer.zero_grad()
        left = step % 2 == 0 if same else (step + fleet.worker_index()) % 2 == 0
        F.cross_entropy(model(x, left), y).backward()
        optimizer.step()
    return flat(model)


def test_unused_parameters_without_the_setting_are_named() -> None:
    with pytest.raises(WorkerFailedError, match="find_unused_parameters=True") as caught:
        run_workers(train_branches, 2, False, True)
    assert "2 of 4 parameters got no gradient" in str(caught.value)
    assert "right.weight" in str(caught.value)


@pytest.mark.contract
@pytest.mark.parametrize("same", [False, True])
def test_find_unused_parameters_allows_unused_parameters(same: bool) -> None:
    results = run_workers(train_branches, 2, True, same)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert not torch.equal(results[0], flat(Branches()))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": self.a(x), "b": self.b(x)}


def ignore_an_output() -> float:
    strategy = fleet.DistributedStrategy(find_unused_parameters=True)
    model = fleet.distributed_model(TwoHeads())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), strategy)
    for _ in range(3):
        descend(optimizer, model(torch.ones(2, 4) * (1 + fleet.worker_index()))["a"].sum())
    return float(flat(model).sum())


def test_the_loss_may_ignore_an_output() -> None:
    assert len(set(run_workers(ignore_an_output))) == 1


def different_models(what: str) -> None:
    width = 8 + (fleet.worker_index() if what == "shape" else 0)
    layers: list[nn.Module] = [nn.Linear(FEATURES, width)]
    if what == "count" and fleet.worker_index() == 1:
        layers.append(nn.Linear(width, 2))
    model = fleet.distributed_model(nn.Sequential(*layers))
    model(torch.ones(1, FEATURES))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("shape", r"0\.weight is float32 \[8, 6\] on worker 0, but float32 \[9, 6\] on worker 1"),
        ("count", r"worker 1 has 1\.weight, worker 0 does not"),
    ],
)
def test_different_models_are_refused(what: str, text: str) -> None:
    with pytest.raises(WorkerFailedError, match=text):
        run_workers(different_models, 2, what)


def worker_1_dies_after_a_step() -> None:
    model = fleet.distributed_model(mlp(0))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    F.cross_entropy(model(data()[0]), data()[1]).backward()
    optimizer.step()
    if fleet.worker_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # the gradient order is known now, and worker 0 broadcasts it
    model(data()[0])


def test_a_worker_lost_while_agreeing_on_buckets_is_named() -> None:
    with pytest.raises(WorkerFailedError, match=r"agreeing on the buckets .* worker 1 \(pid"):
        run_workers(worker_1_dies_after_a_step)


def train_sparse() -> Any:
    torch.manual_seed(0)
    model = fleet.distributed_model(
        nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2)).double()
    )
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    ids = torch.tensor([[1, 2], [1, 3], [4, 4], [5, 1]])
    for _ in range(3):
        optimizer.zero_grad()
        model(my_part(ids)).pow(2).mean().backward()
        assert model[0].weight.grad.is_sparse
        optimizer.step()
    return flat(model)


def plain_sparse() -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        descend(optimizer, model(torch.tensor([[1, 2], [1, 3], [4, 4], [5, 1]])).pow(2).mean())
    return flat(model)


def test_sparse_gradients_are_reduced() -> None:
    for result in run_workers(train_sparse):
        torch.testing.assert_close(result, plain_sparse(), rtol=0, atol=1e-12)


def copies() -> Any:
    model = fleet.distributed_model(mlp(0))
    before = copy.deepcopy(model)
    model(data()[0][:1]).sum().backward()
    average = copy.deepcopy(model)
    file = io.BytesIO()
    pickle.dump(model, file)
    file.seek(0)
    loaded = pickle.load(file)
    x = data()[0]
    # a copy is not a replica, so one worker alone may call it
    if fleet.worker_index() == 0:
        for other in (before, average, loaded):
            other.train()
            other(x).sum().backward()
    names = [name for name, _ in model.named_parameters()]
    return names, bool(torch.equal(loaded(x), model.eval()(x))), type(model).__name__


def test_names_are_kept_and_copies_are_plain_modules() -> None:
    for names, same, kind in run_workers(copies):
        assert names == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert same
        assert kind == "Sequential"


def running_mean_after_steps() -> Any:
    torch.manual_seed(0)
    model = fleet.distributed_model(nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4)))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    x = my_part(data(torch.float32)[0])
    for _ in range(3):
        descend(optimizer, model(x).pow(2).sum())
    fleet.barrier_worker()
    return model[1].running_mean


def test_buffers_follow_worker_0() -> None:
    zero, one = run_workers(running_mean_after_steps)
    torch.testing.assert_close(zero, one, rtol=0, atol=0)


def two_optimizers() -> Any:
    model = fleet.distributed_model(mlp(0))
    strategy = fleet.DistributedStrategy(gradient_scale="sum")
    first = fleet.distributed_optimizer(torch.optim.SGD(model[0].parameters(), 0.1), strategy)
    second = fleet.distributed_optimizer(torch.optim.SGD(model[2].parameters(), 0.1))
    x, y = my_part(data()[0]), my_part(data()[1])
    for _ in range(3):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        first.step()
        second.step()
    return flat(model)


def test_two_optimizers_reduce_gradients_once() -> None:
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = data()
    for _ in range(3):
        descend(optimizer, 2 * F.cross_entropy(model(x), y))
    for result in run_workers(two_optimizers):
        torch.testing.assert_close(result, flat(model), rtol=0, atol=1e-12)


def step_with_a_foreign_parameter() -> None:
    model = fleet.distributed_model(mlp(0))
    loose = nn.Parameter(torch.ones(1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD([*model.parameters(), loose], 0.1))
    model(data()[0]).sum().backward()
    with pytest.raises(PlanError, match="1 parameters of the optimizer are in no"):
        optimizer.step()


def test_a_parameter_outside_the_model_is_refused() -> None:
    run_workers(step_with_a_foreign_parameter)


# All workers step with equal, correct gradients, whatever computes them.

Ways = dict[str, Callable[[nn.Sequential, torch.Tensor, torch.Tensor], None]]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def records() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 6, generator=generator).double()
    return x, torch.randint(0, 3, (24,), generator=generator)


def two_losses(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> None:
    output = model(x)
    F.cross_entropy(output, y).backward(retain_graph=True)
    output.pow(2).mean().backward()


def two_forwards(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> None:
    one, two = model(x), model(2 * x)
    F.cross_entropy(one, y).backward()
    F.cross_entropy(two, y).backward()


def a_part_after_the_whole(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    model[0](x).pow(2).mean().backward()


def no_sync_afterwards(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    if fleet.worker_num() > 1:
        with fleet.no_sync():
            F.cross_entropy(model(2 * x), y).backward()
    else:
        F.cross_entropy(model(2 * x), y).backward()


def in_eval_mode(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    model.eval()
    F.cross_entropy(model(2 * x), y).backward()
    model.train()


def parts_alone(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> None:
    F.cross_entropy(model[2](model[1](model[0](x))), y).backward()


def assigned(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> None:
    parameters = list(model.parameters())
    # the gradient of a sum is an expanded scalar
    loss = F.cross_entropy(model(x), y) + parameters[3].sum()
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = g
    fleet.clip_grad_norm_(parameters, 0.5)


def accumulated(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> None:
    for scale in (1, 2, 3):
        F.cross_entropy(model(scale * x), y).backward()


WAYS: Ways = {
    f.__name__: f
    for f in (
        two_losses,
        two_forwards,
        a_part_after_the_whole,
        no_sync_afterwards,
        in_eval_mode,
        parts_alone,
        assigned,
        accumulated,
    )
}


def train_way(way: str, scale: str) -> torch.Tensor:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if fleet.worker_num() > 1:
        strategy = fleet.DistributedStrategy(gradient_scale=scale)
        model = fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(optimizer, strategy)
    for _ in range(3):
        optimizer.zero_grad()
        WAYS[way](model, my_part(records()[0]), my_part(records()[1]))
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("way", WAYS)
def test_every_kind_of_backward_equals_one_process(way: str) -> None:
    [plain] = run_workers(train_way, 1, way, "mean")
    for result in run_workers(train_way, 2, way, "mean"):
        torch.testing.assert_close(result, plain, rtol=0, atol=1e-12)


def summed(way: str) -> torch.Tensor:
    """One process with a loss twice as large."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        WAYS[way](model, *records())
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(2)
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize("way", ["two_forwards", "accumulated", "in_eval_mode"])
def test_gradient_scale_sum_is_applied_once(way: str) -> None:
    [plain] = run_workers(summed, 1, way)
    for result in run_workers(train_way, 2, way, "sum"):
        torch.testing.assert_close(result, plain, rtol=0, atol=1e-12)


def change_parameters(what: str) -> torch.Tensor:
    torch.manual_seed(fleet.worker_index())
    model = fleet.distributed_model(network())
    if what == "unfreeze":
        model[0].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(trained, 0.1))
    x, y = my_part(records()[0]), my_part(records()[1])
    for step in range(4):
        if step == 2 and what == "unfreeze":
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})
        if step == 2 and what == "freeze":
            model[0].requires_grad_(False)
        if step == 2 and what == "append":
            model.append(nn.Linear(3, 3).double())
            optimizer.add_param_group({"params": list(model[3].parameters())})
        descend(optimizer, F.cross_entropy(model(x), y))
    return flat(model)


@pytest.mark.parametrize("what", ["unfreeze", "freeze", "append"])
def test_parameters_may_be_frozen_unfrozen_and_added(what: str) -> None:
    zero, one = run_workers(change_parameters, 2, what)
    torch.testing.assert_close(zero, one, rtol=0, atol=1e-12)


def all_frozen() -> bool:
    model = fleet.distributed_model(network().requires_grad_(False))
    return bool(model(records()[0]).isfinite().all())


def test_a_model_without_trainable_parameters_runs() -> None:
    assert run_workers(all_frozen) == [True, True]


def accumulate_at_the_tail(records_: int, merge: int) -> torch.Tensor:
    """Blocks of 8; the last one is short and may leave a worker without a record."""
    strategy = fleet.DistributedStrategy(gradient_merge=True)
    strategy.gradient_merge_configs = {"k_steps": merge}
    model = fleet.distributed_model(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    x, y = (tensor[:records_] for tensor in records())
    loader = fleet.shard(DataLoader(TensorDataset(x, y), batch_size=8 // fleet.worker_num()))
    for inputs, labels in loader:
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


@pytest.mark.parametrize("records_", [11, 9, 16])
def test_a_short_block_may_be_merged(records_: int) -> None:
    [plain] = run_workers(accumulate_at_the_tail, 1, records_, 2)
    for result in run_workers(accumulate_at_the_tail, 2, records_, 2):
        torch.testing.assert_close(result, plain, rtol=0, atol=1e-12)


def validate_in_between() -> torch.Tensor:
    model = fleet.distributed_model(network())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    x, y = records()
    data = TensorDataset(x[:11], y[:11])
    loader = fleet.shard(DataLoader(data, batch_size=8 // fleet.worker_num()))
    other = fleet.shard(DataLoader(TensorDataset(x[:9]), batch_size=8 // fleet.worker_num()))
    for inputs, labels in loader:
        for number, _ in enumerate(other):
            if number == 1:
                break  # in the middle of a short block
        descend(optimizer, F.cross_entropy(model(inputs), labels))
    return flat(model)


def test_a_validation_inside_the_loop_changes_no_weight() -> None:
    [plain] = run_workers(validate_in_between, 1)
    for result in run_workers(validate_in_between, 2):
        torch.testing.assert_close(result, plain, rtol=0, atol=1e-12)


def merged_with_scaler() -> None:
    strategy = fleet.DistributedStrategy(gradient_merge=True)
    strategy.gradient_merge_configs.k_steps = 2
    model = fleet.distributed_model(network().float())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 6)).sum()).backward()
    with pytest.raises(PlanError, match="GradScaler"):
        scaler.step(optimizer)


def test_gradient_merge_under_a_users_scaler_is_refused() -> None:
    run_workers(merged_with_scaler, 1)


def lbfgs() -> torch.Tensor:
    model = network()
    optimizer: Any = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    if fleet.worker_num() > 1:
        model = fleet.distributed_model(model)
        optimizer = fleet.distributed_optimizer(optimizer)
    x, y = my_part(records()[0]), my_part(records()[1])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return flat(model)


def test_a_line_search_uses_the_mean_loss() -> None:
    [plain] = run_workers(lbfgs, 1)
    for result in run_workers(lbfgs, 2):
        torch.testing.assert_close(result, plain, rtol=0, atol=1e-6)


def shares_parameters() -> None:
    model = fleet.distributed_model(network())
    with pytest.raises(PlanError, match="also a parameter of another registered model"):
        fleet.distributed_model(nn.Sequential(model[0]))


def test_models_that_share_parameters_are_refused() -> None:
    run_workers(shares_parameters, 1)


def lazy() -> None:
    model = fleet.distributed_model(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(PlanError, match=r"0\.weight has no shape yet"):
        model(torch.ones(2, 4))


def test_an_uninitialised_lazy_module_is_refused() -> None:
    run_workers(lazy)


def complex_numbers() -> torch.Tensor:
    torch.manual_seed(0)
    model = fleet.distributed_model(nn.Linear(3, 2, dtype=torch.complex64))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    x = torch.full((2, 3), 1.0 + fleet.worker_index(), dtype=torch.complex64)
    model(x).abs().pow(2).mean().backward()
    optimizer.step()
    return flat(model)


def test_complex_parameters_are_reduced() -> None:
    zero, one = run_workers(complex_numbers)
    assert torch.equal(zero, one)


def forgets_the_model() -> list[str]:
    import logging

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fleetlight").addHandler(handler)
    for _ in fleet.shard(DataLoader(TensorDataset(torch.ones(8)), batch_size=2)):
        pass
    return records


def test_an_unregistered_model_is_warned_about() -> None:
    for texts in run_workers(forgets_the_model):
        assert sum("no model is registered" in text for text in texts) == 1
