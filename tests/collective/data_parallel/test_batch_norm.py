# SPDX-License-Identifier: Apache-2.0
"""Synchronised batch norm equals batch norm on the whole batch, forward and backward."""

from typing import Any

import pytest
import torch
from tests.workers import descend, run_workers
from torch import nn

import fleetlight as fleet
from fleetlight.fleet.job import current
from fleetlight.fleet.training.model import ForwardEntry

pytestmark = pytest.mark.multiprocess


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 5, 3, stride=2),
        nn.BatchNorm2d(5, momentum=None, affine=False),
        nn.Flatten(),
        nn.Linear(5 * 9, 6),
        nn.BatchNorm1d(6),
    ).double()


def images() -> torch.Tensor:
    return torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double() + 3


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(sizes: list[int]) -> Any:
    strategy = fleet.DistributedStrategy(sync_batch_norm=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    model = fleet.distributed_model(model)
    index = fleet.worker_index()
    part = images()[sum(sizes[:index]) : sum(sizes[: index + 1])]
    model.eval()(part)
    model.train()
    for _ in range(3):
        if len(set(sizes)) > 1:
            current().models[0].set_batch_weight(sizes[index] * len(sizes) / sum(sizes))
        descend(optimizer, model(part).pow(2).sum(1).mean())
    return state(model)


def plain() -> dict[str, torch.Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        descend(optimizer, model(images()).pow(2).sum(1).mean())
    return state(model)


@pytest.mark.parametrize("sizes", [[5, 7], [6, 6], [4, 4, 4]])
def test_all_workers_equal_one_process(sizes: list[int]) -> None:
    expected = plain()
    for result in run_workers(train, len(sizes), sizes):
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value, rtol=0, atol=1e-11, msg=name)


def alone() -> Any:
    """The whole model is one batch norm; its bias is frozen after two steps."""
    strategy = fleet.DistributedStrategy(sync_batch_norm=True)
    model = nn.BatchNorm1d(8).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = fleet.distributed_optimizer(optimizer, strategy)
    model = fleet.distributed_model(model)
    result = normalise(model, optimizer, rows().chunk(fleet.worker_num())[fleet.worker_index()])
    # still wrapped, so that gradients are reduced in backward
    assert isinstance(model.forward, ForwardEntry)
    return result


def rows() -> torch.Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(2)).double() * 3 + 1


def normalise(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    first = None
    for step in range(4):
        model.bias.requires_grad_(step < 2)
        optimizer.zero_grad()
        y = model(x)
        first = y.detach().clone() if first is None else first
        (y - x.tanh()).pow(2).sum(1).mean().backward()
        optimizer.step()
    return first, state(model)


def test_a_model_can_be_a_single_batch_norm() -> None:
    model = nn.BatchNorm1d(8).double()
    first, after = normalise(model, torch.optim.SGD(model.parameters(), 0.1), rows())
    results = run_workers(alone)
    torch.testing.assert_close(torch.cat([y for y, _ in results]), first, rtol=0, atol=1e-12)
    for _, result in results:
        for name, value in after.items():
            torch.testing.assert_close(result[name], value, rtol=0, atol=1e-12, msg=name)


def narrow(dtype: torch.dtype) -> Any:
    """More values per channel than float16 can count, with a mean far from zero."""
    strategy = fleet.DistributedStrategy(sync_batch_norm=True)
    torch.manual_seed(0)
    norm = nn.Sequential(nn.BatchNorm2d(2)).to(dtype)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(norm.parameters(), 0.1), strategy)
    norm = fleet.distributed_model(norm)
    x = many(dtype)[fleet.worker_index() :: 2].requires_grad_()
    y = norm(x)
    (y.float() * torch.linspace(-1, 1, y.shape[-1])).mean().backward()
    optimizer.step()
    assert x.grad is not None
    assert y.dtype == x.grad.dtype == dtype
    return y.detach().float(), x.grad.float(), state(norm)


def many(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(80, 2, 32, 32, generator=torch.Generator().manual_seed(3)) * 4 + 20
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_counted_and_summed_in_float32(dtype: torch.dtype) -> None:
    x = many(dtype).float().requires_grad_()
    wide = nn.BatchNorm2d(2)
    y = wide(x)
    (y * torch.linspace(-1, 1, y.shape[-1])).mean().backward()
    assert x.grad is not None
    step = torch.finfo(dtype).eps
    for index, (mine, gradient, after) in enumerate(run_workers(narrow, 2, dtype)):
        torch.testing.assert_close(mine, y[index::2].detach(), rtol=step, atol=step)
        # a mean over half of the batch has twice the gradient
        torch.testing.assert_close(gradient, 2 * x.grad[index::2], rtol=4 * step, atol=1e-6)
        assert after["0.running_var"].dtype is dtype
        expected = {"running_mean": wide.running_mean, "running_var": wide.running_var}
        for name, value in expected.items():
            assert value is not None
            torch.testing.assert_close(after[f"0.{name}"].float(), value, rtol=2 * step, atol=0)
