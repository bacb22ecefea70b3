# SPDX-License-Identifier: Apache-2.0
"""LARS and LAMB equal the formulas of their papers, written in NumPy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fleetlight as fleet
from fleetlight.errors import ConfigError, PlanError
from fleetlight.ps.tables.optimizers import optimizer_plan, rule_of

Array = Any
STEPS = 5


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def gradients(step: int) -> list[Array]:
    draw = np.random.default_rng(step)
    return [draw.normal(size=tuple(p.shape)) for p in model().parameters()]


def trained(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Array]:
    for step in range(STEPS):
        for parameter, gradient in zip(net.parameters(), gradients(step), strict=True):
            parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    return [p.detach().numpy() for p in net.parameters()]


def length(array: Array) -> float:
    return float(np.sqrt((array * array).sum()))


def lars(w: Array, state: dict[str, Array], g: Array, t: int, plain: bool) -> Array:
    lr, momentum, coeff, decay, epsilon = 0.5, 0.9, 0.01, 0.002, 1e-9
    rate = lr
    if plain:
        decay = 0.0
    elif length(w) and length(g):
        rate = lr * coeff * length(w) / (length(g) + decay * length(w) + epsilon)
    state["v"] = momentum * state.get("v", 0.0) + rate * (g + decay * w)
    return w - state["v"]


def lamb(w: Array, state: dict[str, Array], g: Array, t: int, plain: bool) -> Array:
    lr, beta1, beta2, epsilon, decay = 0.05, 0.8, 0.99, 1e-6, 0.02
    state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g * g
    r = (state["m"] / (1 - beta1**t)) / (np.sqrt(state["v"] / (1 - beta2**t)) + epsilon)
    if plain:
        return w - lr * r
    r = r + decay * w
    ratio = length(w) / length(r) if length(w) and length(r) else 1.0
    return w - lr * ratio * r


Make = Callable[..., torch.optim.Optimizer]
BOTH: dict[str, tuple[Any, Make]] = {
    "lars": (
        lars,
        lambda p, **more: fleet.optim.Lars(
            p, 0.5, lars_coeff=0.01, lars_weight_decay=0.002, epsilon=1e-9, **more
        ),
    ),
    "lamb": (
        lamb,
        lambda p, **more: fleet.optim.Lamb(
            p, 0.05, betas=(0.8, 0.99), lamb_weight_decay=0.02, **more
        ),
    ),
}


@pytest.mark.parametrize("exclude", [[], ["bias", "1."]], ids=str)
@pytest.mark.parametrize("name", BOTH)
def test_steps_equal_the_formula(name: str, exclude: list[str]) -> None:
    """A batch norm has a bias of 0, whose ratio is undefined."""
    formula, make = BOTH[name]
    net = model()
    expected = []
    for number, (path, parameter) in enumerate(net.named_parameters()):
        w, state = parameter.detach().numpy().copy(), {}
        for t in range(1, STEPS + 1):
            plain = any(word in path for word in exclude)
            w = formula(w, state, gradients(t - 1)[number], t, plain)
        expected.append(w)
    found = trained(net, make(net.named_parameters(), exclude_from_weight_decay=exclude))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


def test_defaults_are_those_of_fleet() -> None:
    [group] = fleet.optim.Lars(model().parameters(), lr=1.0).param_groups
    assert (group["lars_coeff"], group["lars_weight_decay"]) == (0.001, 0.0005)
    assert fleet.optim.Lamb(model().parameters()).param_groups[0]["lamb_weight_decay"] == 0.01


@pytest.mark.parametrize("name", BOTH)
def test_a_loaded_state_continues_the_training(name: str) -> None:
    _, make = BOTH[name]
    net = model()
    optimizer = make(net.named_parameters(), exclude_from_weight_decay=["bias"])
    trained(net, optimizer)
    other = copy.deepcopy(net)
    again = make(other.named_parameters(), exclude_from_weight_decay=["bias"])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, two in zip(trained(net, optimizer), trained(other, again), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("name", BOTH)
def test_names_are_needed_to_exclude(name: str) -> None:
    with pytest.raises(ConfigError, match=r"pass model\.named_parameters\(\)"):
        BOTH[name][1](model().parameters(), exclude_from_weight_decay=["bias"])
    with pytest.raises(ConfigError, match="expected a list of strings"):
        BOTH[name][1](model().named_parameters(), exclude_from_weight_decay="bias")


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="Lars: got lars_coeff=-1"):
        fleet.optim.Lars(model().parameters(), lr=1.0, lars_coeff=-1)
    with pytest.raises(ConfigError, match="below 1"):
        fleet.optim.Lamb(model().parameters(), betas=(0.9, 1.0))


@pytest.mark.parametrize("name", BOTH)
def test_sparse_gradients_are_refused(name: str) -> None:
    layer = nn.Embedding(5, 2, sparse=True)
    optimizer = BOTH[name][1](layer.parameters())
    out: Tensor = layer(torch.tensor([1, 2]))
    out.sum().backward()
    with pytest.raises(
        ConfigError, match="got a sparse gradient, but needs the norm of a dense one"
    ):
        optimizer.step()


@pytest.mark.parametrize("name", BOTH)
def test_servers_do_not_split_parameters_and_tables_are_refused(name: str) -> None:
    optimizer = BOTH[name][1](model().parameters())
    assert not optimizer_plan(optimizer).elementwise
    with pytest.raises(
        PlanError, match=rf"table 'ids' is in the optimizer fleetlight\.optim\.{name}"
    ):
        rule_of(optimizer, optimizer.param_groups[0], "ids")
