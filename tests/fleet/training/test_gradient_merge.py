# SPDX-License-Identifier: Apache-2.0
"""Gradient merge: k backwards make one step, however a script clears gradients."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.workers import run_workers
from torch import nn
from torch.nn import functional as F

import fleetlight as fleet
from fleetlight.errors import PlanError

pytestmark = pytest.mark.multiprocess

PARTS, STEPS = 3, 2


def records() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 6, generator=generator).double()
    return x, torch.randint(0, 3, (24,), generator=generator)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)).double()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def parts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This worker's batches of one merged step."""
    number, index = fleet.worker_num(), fleet.worker_index()
    return [
        (x.chunk(number)[index], y.chunk(number)[index])
        for x, y in zip(*(tensor.chunk(PARTS) for tensor in records()), strict=True)
    ]


def merging(**configs: Any) -> fleet.DistributedStrategy:
    configs = {"k_steps": PARTS, **configs}
    return fleet.DistributedStrategy(gradient_merge=True, gradient_merge_configs=configs)


def train(model: nn.Module, optimizer: Any, clear: Callable[[], object]) -> torch.Tensor:
    for _ in range(STEPS):
        for x, y in parts():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            clear()
    return flat(model)


def plain(scale: float = 1.0) -> torch.Tensor:
    """One process that trains on all parts at once."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = records()
    for _ in range(STEPS):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * scale).backward()
        optimizer.step()
    return flat(model)


def merged(avg: bool, model_first: bool) -> Any:
    model = network()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    if model_first:
        model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer, merging(avg=avg))
    if not model_first:
        model = fleet.distributed_model(model)
    return train(model, optimizer, optimizer.zero_grad)


@pytest.mark.parametrize("workers", [2, 1])
@pytest.mark.parametrize("avg", [True, False])
def test_three_backwards_make_one_step(workers: int, avg: bool) -> None:
    for result in run_workers(merged, workers, avg, workers == 1):
        expected = plain(1 if avg else PARTS)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def forget(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def cleared_in_every_way() -> list[torch.Tensor]:
    """A model for each way to drop gradients, trained one after the other."""
    results = []
    for way in (
        lambda model: model.zero_grad(),
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: [layer.zero_grad() for layer in model],
        forget,
        lambda model: None,
    ):
        model = fleet.distributed_model(network())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer = fleet.distributed_optimizer(optimizer, merging() if not results else None)
        for _ in range(STEPS):
            for x, y in parts():
                # gradients of another loss are dropped, as without merging
                model(x).sum().backward()
                way(model)
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                way(model)
            model.zero_grad()
        results.append(flat(model))
    return results


def test_clearing_gradients_loses_no_merged_part() -> None:
    for *cleared, kept in run_workers(cleared_in_every_way):
        for result in cleared:
            torch.testing.assert_close(result, plain(), rtol=0, atol=1e-12)
        assert not torch.allclose(kept, plain())


def set_late(scheduler_first: bool) -> Any:
    """The strategy changes after distributed_optimizer; schedulers come before or after."""
    model = fleet.distributed_model(network())
    strategy = fleet.DistributedStrategy()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    schedulers = []
    if scheduler_first:
        schedulers.append(torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    strategy.gradient_merge = True
    strategy.gradient_merge_configs.k_steps = PARTS
    if not scheduler_first:
        schedulers.append(torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0))

    def clear() -> None:
        optimizer.zero_grad()
        schedulers[0].step()

    with warnings.catch_warnings():
        # torch warns of a scheduler that comes before the first step
        warnings.simplefilter("error")
        return train(model, optimizer, clear)


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_strategy_is_read_when_training_begins(scheduler_first: bool) -> None:
    for result in run_workers(set_late, 2, scheduler_first):
        torch.testing.assert_close(result, plain(), rtol=0, atol=1e-12)


def two_optimizers() -> torch.Tensor:
    """Each steps one layer of a model; the last part uses only one of them."""
    strategy = merging()
    strategy.find_unused_parameters = True
    model = fleet.distributed_model(network())
    optimizers = [
        fleet.distributed_optimizer(torch.optim.Adam(model[i].parameters(), lr=0.01), strategy)
        for i in (0, 2)
    ]
    for _ in range(STEPS):
        for i, (x, y) in enumerate(parts()):
            hidden = model(x) if i < PARTS - 1 else model[2](model[0](x).relu().detach())
            F.cross_entropy(hidden, y).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    return flat(model)


def plain_without_the_last_part_of_a_layer() -> torch.Tensor:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for i, (x, y) in enumerate(zip(*(t.chunk(PARTS) for t in records()), strict=True)):
            hidden = model[1](model[0](x))
            hidden = hidden if i < PARTS - 1 else hidden.detach()
            (F.cross_entropy(model[2](hidden), y) / PARTS).backward()
        optimizer.step()
    return flat(model)


def test_two_optimizers_and_a_part_that_skips_a_layer() -> None:
    expected = plain_without_the_last_part_of_a_layer()
    for result in run_workers(two_optimizers):
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def clipped() -> Any:
    model = fleet.distributed_model(network())
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1), merging())
    norms = []
    for x, y in parts():
        F.cross_entropy(model(x) * 50, y).backward()
        norms.append(float(fleet.clip_grad_norm_(model, 0.5)))
        optimizer.step()
        model.zero_grad()
    return norms, flat(model)


def test_clipping_sees_the_merged_gradient() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    F.cross_entropy(model(records()[0]) * 50, records()[1]).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    (norms, end), (others, _) = run_workers(clipped)
    assert norms == others
    assert norms[-1] == pytest.approx(norm, abs=1e-12)
    torch.testing.assert_close(end, flat(model), rtol=0, atol=1e-12)


def overflow() -> Any:
    """The first part of the first step is infinite on one worker."""
    strategy = merging()
    strategy.amp = True
    strategy.amp_configs = {"dtype": "float16", "init_loss_scaling": 4.0}
    model = fleet.distributed_model(network().float())
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    ends = []
    for step in range(2):
        for part, (x, y) in enumerate(parts()):
            loss = F.cross_entropy(model(x.float()), y)
            if fleet.worker_index() == 1 and (step, part) == (0, 0):
                loss = loss * float("inf")
            optimizer.minimize(loss)
            optimizer.zero_grad()
        ends.append(flat(model))
    return ends


def test_skipped_step_drops_its_parts() -> None:
    model = network()
    F.cross_entropy(model(records()[0]), records()[1]).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    for first, second in run_workers(overflow):
        assert torch.equal(first.double(), flat(network()))
        torch.testing.assert_close(second.double(), flat(model), rtol=0, atol=1e-3)


def refused() -> None:
    model = fleet.distributed_model(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = fleet.distributed_optimizer(optimizer, merging())
    model(records()[0]).sum().backward()
    with pytest.raises(PlanError, match="a closure"):
        optimizer.step(lambda: 0.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(records()[0]).sum()).backward()
    with pytest.raises(PlanError, match="a GradScaler"):
        scaler.step(optimizer)


def test_unsupported_merges_are_refused() -> None:
    run_workers(refused, 1)
