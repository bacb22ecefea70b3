# SPDX-License-Identifier: Apache-2.0
"""Bags of rows, compared with the twin and with torch's EmbeddingBag."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.batches import numbers, same
from torch.nn import functional

from fleetlight.errors import ConfigError
from fleetlight.kernels import gather_bags, spread_bags, twin_table, weight_grads

lengths = st.lists(st.integers(0, 5), min_size=1, max_size=12)
MODES = ["sum", "mean", "max"]


@settings(deadline=None, max_examples=50)
@given(lengths, st.sampled_from(MODES), st.booleans(), st.integers(1, 18), st.integers(0, 99))
def test_bags_equal_the_twin(
    sizes: list[int], mode: str, weighted: bool, dim: int, seed: int
) -> None:
    offsets = np.cumsum([0, *sizes])
    count = int(offsets[-1])
    inverse = np.random.default_rng(seed).integers(0, 5, count).astype(np.int32)
    rows, grads = numbers(seed, 5, dim), numbers(seed + 1, len(sizes), dim)
    weights = numbers(seed + 2, count) if weighted and mode == "sum" else None
    bags, chosen = gather_bags(rows, inverse, offsets, weights, mode)  # type: ignore[arg-type]
    twin_bags, twin_chosen = twin_table.gather_bags(rows, inverse, offsets, weights, mode)
    np.testing.assert_allclose(bags, twin_bags, rtol=1e-5, atol=1e-6)
    assert (chosen is None) == (twin_chosen is None)
    assert chosen is None or twin_chosen is None or same(chosen, twin_chosen)
    spread = spread_bags(grads, inverse, offsets, weights, mode, 5, chosen)  # type: ignore[arg-type]
    expected = twin_table.spread_bags(grads, inverse, offsets, weights, mode, 5, chosen)
    np.testing.assert_allclose(spread, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        weight_grads(grads, rows, inverse, offsets),
        twin_table.weight_grads(grads, rows, inverse, offsets),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize("mode", MODES)
def test_bags_equal_torch(mode: str) -> None:
    rows = torch.randn(9, 4, requires_grad=True)
    inverse, offsets = torch.randint(0, 9, (20,)), torch.tensor([0, 3, 3, 11])
    weights = torch.rand(20, requires_grad=True) if mode == "sum" else None
    bags = functional.embedding_bag(
        inverse, rows, offsets, mode=mode, per_sample_weights=weights, sparse=False
    )
    grads = torch.randn(4, 4)
    bags.backward(grads)
    ends = np.append(offsets.numpy(), 20)
    plain = None if weights is None else weights.detach().numpy()
    values = rows.detach().numpy()
    ours, chosen = gather_bags(values, inverse.numpy(), ends, plain, mode)  # type: ignore[arg-type]
    np.testing.assert_allclose(ours, bags.detach().numpy(), rtol=1e-5, atol=1e-6)
    spread = spread_bags(grads.numpy(), inverse.numpy(), ends, plain, mode, 9, chosen)  # type: ignore[arg-type]
    assert rows.grad is not None
    np.testing.assert_allclose(spread, rows.grad.numpy(), rtol=1e-5, atol=1e-6)
    if weights is not None:
        assert weights.grad is not None
        ours = weight_grads(grads.numpy(), values, inverse.numpy(), ends)
        np.testing.assert_allclose(ours, weights.grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("offsets", [[0], [1, 2], [0, 3], [0, 2, 1, 2], []])
def test_offsets_must_rise_from_zero_to_the_number_of_positions(offsets: list[int]) -> None:
    with pytest.raises(ConfigError, match="to rise from 0 to 2, one more than there are bags"):
        gather_bags(np.ones((1, 2)), [0, 0], offsets)


def test_arguments_that_torch_refuses_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected mode='sum' as in torch"):
        gather_bags(np.ones((1, 2)), [0], [0, 1], [1.0], "mean")
    with pytest.raises(ConfigError, match="1 weights for 2 positions"):
        gather_bags(np.ones((1, 2)), [0, 0], [0, 2], [1.0])
    with pytest.raises(ConfigError, match="known names: max, mean, sum"):
        gather_bags(np.ones((1, 2)), [0], [0, 1], mode="product")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs chosen="):
        spread_bags(np.ones((1, 2)), [0], [0, 1], None, "max", 1)


def test_max_chooses_the_first_of_equal_values() -> None:
    _, chosen = gather_bags(np.ones((3, 1)), [2, 0, 1], [0, 3], mode="max")
    assert chosen is not None
    assert chosen.tolist() == [[2]]


def test_max_propagates_nan() -> None:
    rows = np.array([[1], [np.nan], [2]], np.float32)
    bags, chosen = gather_bags(rows, [0, 1, 2], [0, 3], mode="max")
    assert np.isnan(bags[0, 0])
    assert chosen is not None
    assert chosen.tolist() == [[1]]
