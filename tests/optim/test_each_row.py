# SPDX-License-Identifier: Apache-2.0
"""`Ftrl` and the row-wise optimizers equal the rules of tables, with dense and sparse gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.batches import numbers
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight.errors import ConfigError
from fleetlight.kernels import RowTable
from fleetlight.ps.tables.optimizers import push_options

ROWS, DIM, STEPS = 9, 4, 8
Make = Callable[..., torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "ftrl": lambda p: fleet.optim.Ftrl(p, 0.3, beta=0.5, l1=0.4, l2=0.1),
    "rowwise_adagrad": lambda p: fleet.optim.RowwiseAdagrad(
        p, 0.3, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5
    ),
    "rowwise_adam": lambda p: fleet.optim.RowwiseAdam(p, 0.1, betas=(0.8, 0.9), weight_decay=0.1),
}


def weights() -> nn.Parameter:
    """Half of them are 0."""
    values = numbers(1, ROWS, DIM)
    values[:, ::2] = 0
    return nn.Parameter(torch.from_numpy(values))


def sparse(ids: Tensor, values: Tensor) -> Tensor:
    # torch warns if the setting was never made
    torch.sparse.check_sparse_tensor_invariants.disable()
    return torch.sparse_coo_tensor(ids[None], values, (ROWS, DIM))


def table_of(name: str, weight: Tensor) -> RowTable:
    table = RowTable(DIM, name)
    first = 0.5 if name == "rowwise_adagrad" else 0.0
    state = np.full((ROWS, table.state_width), first, np.float32)
    table.load(np.arange(ROWS), np.hstack([weight.detach().numpy(), state]))
    return table


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_steps_equal_the_rule_of_tables(name: str, layout: str) -> None:
    weight = weights()
    optimizer, table = MAKES[name]([weight]), table_of(name, weight)
    random = np.random.default_rng(0)
    for step in range(1, STEPS + 1):
        ids = np.arange(ROWS) if layout == "dense" else random.integers(0, ROWS, 6)
        grads = numbers(step, len(ids), DIM)
        if layout == "dense":
            weight.grad = torch.from_numpy(grads)
        else:
            weight.grad = sparse(torch.from_numpy(ids), torch.from_numpy(grads))
        optimizer.step()
        hyper = table.rule.hyper(push_options(optimizer.param_groups[0]), step)
        table.push(ids, grads, hyper)
    found = table.pull(np.arange(ROWS))
    np.testing.assert_allclose(found, weight.detach().numpy(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", MAKES)
def test_rows_outside_of_a_sparse_gradient_stay(name: str) -> None:
    weight = weights()
    before = weight.detach().clone()
    weight.grad = sparse(torch.tensor([3, 5, 3]), torch.ones(3, DIM))
    MAKES[name]([weight]).step()
    moved = (weight != before).any(1)
    assert moved.nonzero().flatten().tolist() == [3, 5]


def test_ftrl_keeps_weights_of_0_until_there_is_evidence() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = fleet.optim.Ftrl([weight], 0.1, l1=1.0)
    for _ in range(2):
        weight.grad = torch.tensor([0.6, -0.4, 0.0])
        optimizer.step()
    # 1.2 - 1 over (1 + sqrt(2 x 0.36)) / 0.1
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.2 * 0.1 / (1 + 0.72**0.5), 0, 0]))


@pytest.mark.parametrize(
    ("kind", "name", "step"),
    [(fleet.optim.RowwiseAdam, "exp_avg_sq", 0.001), (fleet.optim.RowwiseAdagrad, "sum", 0.01)],
)
def test_a_row_has_one_number_of_state(kind: Any, name: str, step: float) -> None:
    shapes = {(): (), (3,): (3,), (3, 2): (3, 1), (3, 2, 4): (3, 1, 1)}
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = kind(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = [tuple(optimizer.state[p][name].shape) for p in parameters]
    assert found == list(shapes.values())
    for parameter in parameters:
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 1 - step))


@pytest.mark.parametrize("name", MAKES)
def test_a_loaded_state_continues_the_training(name: str) -> None:
    one = weights()
    optimizer = MAKES[name]([one])
    one.grad = torch.from_numpy(numbers(5, ROWS, DIM))
    optimizer.step()
    two = nn.Parameter(one.detach().clone())
    again = MAKES[name]([two])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    one.grad = two.grad = torch.from_numpy(numbers(6, ROWS, DIM))
    optimizer.step()
    again.step()
    torch.testing.assert_close(one, two, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "options", "error"),
    [
        (fleet.optim.Ftrl, {"lr": 0.1, "l1": -1.0}, "Ftrl: got l1=-1"),
        (fleet.optim.RowwiseAdam, {"betas": (0.9, 1.0)}, "below 1"),
    ],
)
def test_wrong_numbers_are_refused_in_any_group(
    kind: Any, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        kind([weights()], **options)
    with pytest.raises(ConfigError, match=error):
        kind([{"params": [weights()], **options}], lr=0.1)
