# SPDX-License-Identifier: Apache-2.0
"""All workers step with equal, correct gradients, whatever computes them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.workers import run_workers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fleetlight as fleet
from fleetlight.errors import PlanError

pytestmark = pytest.mark.multiprocess

Ways = dict[str, Callable[[nn.Sequential, torch.Tensor, torch.Tensor], None]]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def records() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 6, generator=generator).double()
    return x, torch.randint(0, 3, (24,), generator=generator)


def my_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(fleet.worker_num())[fleet.worker_index()]


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


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


def train(way: str, scale: str) -> torch.Tensor:
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
    [plain] = run_workers(train, 1, way, "mean")
    for result in run_workers(train, 2, way, "mean"):
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
    for result in run_workers(train, 2, way, "sum"):
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
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
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
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
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
