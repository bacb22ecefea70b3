# SPDX-License-Identifier: Apache-2.0
"""Rules, compared with torch's optimizers and with the twins."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.batches import numbers

from fleetlight.errors import ConfigError
from fleetlight.kernels import RULES, RowTable, rule_named, twin_table

Array = NDArray[Any]
ROWS, DIM, STEPS = 12, 6, 7
CASES: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("sgd", torch.optim.SGD, {"lr": 0.3}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.3}),
    (
        "adagrad",
        torch.optim.Adagrad,
        {"lr": 0.3, "lr_decay": 0.1, "eps": 1e-3, "initial_accumulator_value": 0.2},
    ),
    ("adam", torch.optim.SparseAdam, {"lr": 0.1}),
    ("adam", torch.optim.SparseAdam, {"lr": 0.1, "betas": (0.7, 0.8), "eps": 1e-2}),
]


def batches() -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Batches of repeated ids, with a gradient for each id."""
    rng = np.random.default_rng(0)
    return [(rng.integers(0, ROWS, 20), numbers(step, 20, DIM)) for step in range(STEPS)]


@pytest.mark.parametrize(("name", "optimizer", "options"), CASES)
def test_rule_equals_torch_on_sparse_gradients(
    name: str, optimizer: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    table = RowTable(DIM, rule_named(name, options))
    embedding = torch.nn.Embedding(ROWS, DIM, sparse=True)
    torch.nn.init.zeros_(embedding.weight)
    reference = optimizer(embedding.parameters(), **options)
    # torch warns if the setting was never made
    torch.sparse.check_sparse_tensor_invariants.disable()
    for step, (ids, grads) in enumerate(batches(), 1):
        embedding(torch.from_numpy(ids)).backward(torch.from_numpy(grads))
        reference.step()
        reference.zero_grad()
        table.push(ids, grads, table.rule.hyper(reference.param_groups[0], step))
    expected = embedding.weight.detach().numpy()
    np.testing.assert_allclose(table.pull(np.arange(ROWS)), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"weight_decay": 0.1}])
def test_momentum_equals_torch_if_each_step_uses_all_rows(options: dict[str, Any]) -> None:
    options = {"lr": 0.1, "momentum": 0.9, **options}
    table, weights = RowTable(DIM, "momentum"), torch.zeros(ROWS, DIM, requires_grad=True)
    reference = torch.optim.SGD([weights], **options)
    for step in range(STEPS):
        grads = numbers(step, ROWS, DIM)
        weights.grad = torch.from_numpy(grads)
        reference.step()
        table.push(np.arange(ROWS), grads, table.rule.hyper(options))
    expected = weights.detach().numpy()
    np.testing.assert_allclose(table.pull(np.arange(ROWS)), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"lr": 0.01}, {"lr": 0.1, "betas": (0.7, 0.8), "eps": 1e-3, "weight_decay": 0.1}]
)
def test_adamw_equals_torch_if_each_step_uses_all_rows(options: dict[str, Any]) -> None:
    table, weights = RowTable(DIM, "adamw"), torch.zeros(ROWS, DIM, requires_grad=True)
    reference = torch.optim.AdamW([weights], **options)
    for step in range(STEPS):
        grads = numbers(step, ROWS, DIM)
        weights.grad = torch.from_numpy(grads)
        reference.step()
        table.push(np.arange(ROWS), grads, table.rule.hyper(reference.param_groups[0], step + 1))
    expected = weights.detach().numpy()
    np.testing.assert_allclose(table.pull(np.arange(ROWS)), expected, rtol=2e-5, atol=1e-6)


def ftrl_of_the_paper(grads: Array, lr: float, beta: float, l1: float, l2: float) -> Array:
    """McMahan's algorithm 1: the weights after the gradients of each step."""
    z, n, w = (np.zeros(grads.shape[1:]) for _ in range(3))
    for g in grads.astype(np.float64):
        z += g - (np.sqrt(n + g * g) - np.sqrt(n)) / lr * w
        n += g * g
        w = np.where(abs(z) <= l1, 0, -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / lr + l2))
    return w


@pytest.mark.parametrize("l1", [0.0, 0.6, 2.0])
@pytest.mark.parametrize(("beta", "l2"), [(1.0, 0.0), (0.0, 0.3), (0.5, 2.0)])
def test_ftrl_equals_the_paper(l1: float, beta: float, l2: float) -> None:
    options = {"lr": 0.3, "beta": beta, "l1": l1, "l2": l2}
    table, grads = RowTable(DIM, "ftrl"), numbers(7, 20, ROWS, DIM)
    for one in grads:
        table.push(np.arange(ROWS), one, table.rule.hyper(options))
    expected = ftrl_of_the_paper(grads, **options)
    assert (l1 > 0) == bool((expected == 0).any())
    np.testing.assert_allclose(table.pull(np.arange(ROWS)), expected, rtol=1e-4, atol=2e-6)


def test_ftrl_keeps_weights_where_the_gradient_is_0_or_the_rate_changes() -> None:
    table = RowTable(2, "ftrl")
    table.load([4], [[0.5, -0.25, 0, 0, 0, 0]])
    for lr in (0.1, 0.0):
        table.push([4], [[0.0, 1e-30]], table.rule.hyper({"lr": lr, "beta": 0.0}))
    assert table.pull([4]).tolist() == [[0.5, -0.25]]
    table.push([4], [[1.0, 0.0]], table.rule.hyper({"lr": 0.1, "l1": 0.5}))
    before = table.pull([4])
    table.push([4], [[1e-8, 1e-8]], table.rule.hyper({"lr": 0.01, "l1": 0.5}))
    np.testing.assert_allclose(table.pull([4]), before, rtol=1e-6)


gradient = st.one_of(
    st.just(0.0), st.floats(2**-10, 1024, width=32), st.floats(-1024, -(2**-10), width=32)
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "ftrl", "rowwise_adam"])
@given(
    dim=st.integers(1, 9),
    data=st.data(),
    rate=st.floats(0, 2),
    more=st.tuples(st.sampled_from([0.0, 0.1, 1.0]), st.sampled_from([0.0, 0.5, 3.0])),
)
def test_steps_equal_those_of_the_twin(
    name: str, dim: int, data: st.DataObject, rate: float, more: tuple[float, float]
) -> None:
    options = {"lr": rate, "beta": 1.0, "l1": more[1], "l2": more[0], "weight_decay": more[0]}
    table = RowTable(dim, name)
    rows = numbers(dim, 1, table.width)
    rows[:, 0], rows[:, dim:] = 0, 0
    table.load([0], rows)
    for step in range(1, 4):
        grads = np.array([data.draw(st.lists(gradient, min_size=dim, max_size=dim))], np.float32)
        hyper = table.rule.hyper(options, step)
        before = table.rows.copy()
        table.push([0], grads, hyper)
        expected = np.hstack(
            twin_table.update(table.rule, before[:, :dim], before[:, dim:], grads, hyper)
        )
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(table.rows, expected, rtol=1e-5, atol=2e-6 * scale)


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("dim", [1, 3, 16, 19])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_rule_equals_the_twin(name: str, dim: int, decay: float) -> None:
    options = {"lr": 0.1, "weight_decay": decay, "momentum": 0.5, "nesterov": True, "l1": decay}
    table = RowTable(dim, name, meta_width=2)
    end = dim + table.state_width
    before = np.abs(numbers(3, 9, table.width))
    table.load(np.arange(9), before)
    grads, hyper = numbers(4, 9, dim), table.rule.hyper(options, 5)
    table.push(np.arange(9), grads, hyper)
    weights, state = twin_table.update(
        table.rule, before[:, :dim], before[:, dim:end], grads, hyper
    )
    expected = np.hstack([weights, state, before[:, end:]])
    np.testing.assert_allclose(table.rows, expected, rtol=1e-5, atol=1e-6)


def test_unused_rows_do_not_change() -> None:
    table = RowTable(2, "momentum")
    hyper = table.rule.hyper({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5})
    table.push([1, 2], np.ones((2, 2)), hyper)
    before = table.pull([2])
    table.push([1], np.ones((1, 2)), hyper)
    assert (table.pull([2]) == before).all()


def test_state_starts_with_the_initial_accumulator_value() -> None:
    rule = rule_named("rowwise_adagrad", {"initial_accumulator_value": 0.25})
    table = RowTable(3, rule, meta_width=1)
    table.insert([5])
    assert table.rows.tolist() == [[0, 0, 0, 0.25, 0]]


def test_unknown_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'adagrad'"):
        rule_named("adagard")
