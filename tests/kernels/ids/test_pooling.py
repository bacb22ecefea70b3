# SPDX-License-Identifier: Apache-2.0
"""The rows of many features in one kernel, compared with the twin and with bags of one feature."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.batches import numbers

from fleetlight.kernels import gather_bags, spread_bags, twin_table
from fleetlight.kernels.ids.pooling import (
    EACH,
    MAX,
    MEAN,
    SUM,
    WEIGHTED,
    Pooling,
    pool,
    position_grads,
    spread,
    wrong_bounds,
)

#: rows of each table
ROWS = 5
modes = st.lists(st.sampled_from([SUM, MEAN, MAX, WEIGHTED, EACH]), min_size=1, max_size=6)


def pooling_of(chosen: list[int], samples: int, seed: int) -> tuple[Pooling, Any]:
    """Features with these modes, each with its own table, and the rows of all tables."""
    random = np.random.default_rng(seed)
    dims = random.integers(1, 19, len(chosen))
    width = int(sum(d for d, mode in zip(dims, chosen, strict=True) if mode != EACH))
    lengths = random.integers(0, 4, (len(chosen), samples))
    bounds = np.cumsum(np.pad(lengths, ((0, 0), (1, 0))), axis=1)
    bounds += np.concatenate(([0], np.cumsum(lengths.sum(1))[:-1]))[:, None]
    inverse = random.integers(0, ROWS, lengths.sum()).astype(np.int32)
    layout, first, column, free = [], 0, 0, samples * width
    for dim, mode, (start, *_, stop) in zip(dims, chosen, bounds, strict=True):
        layout.append((first, dim, mode, free if mode == EACH else column, width))
        if mode == EACH:
            span = inverse[start:stop]
            span[random.random(len(span)) < 0.3] = -1
            free += (stop - start) * dim
        else:
            column += dim
        first += ROWS * dim
    weights = numbers(seed, len(inverse)) if WEIGHTED in chosen else np.empty(0, np.float32)
    pooling = Pooling(inverse, bounds, weights, np.array(layout, np.int64), int(free))
    return pooling, numbers(seed + 1, first)


@settings(deadline=None, max_examples=60)
@given(modes, st.integers(1, 5), st.integers(0, 99))
def test_pooled_features_equal_the_twin(chosen: list[int], samples: int, seed: int) -> None:
    pooling, rows = pooling_of(chosen, samples, seed)
    out, largest = pool(rows, pooling)
    expected, expected_largest = twin_table.pool(rows, pooling)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    grads = numbers(seed + 2, pooling.size)
    if len(largest):
        # other features do not write there
        pooled = [layout for layout in pooling.layout if layout[2] == MAX]
        for _, dim, _, at, step in pooled:
            cells = at + np.arange(samples)[:, None] * step + np.arange(dim)
            assert np.array_equal(largest[cells], expected_largest[cells])
    np.testing.assert_allclose(
        spread(grads, pooling, len(rows), largest),
        twin_table.spread(grads, pooling, len(rows), largest),
        rtol=1e-4,
        atol=1e-5,
    )
    np.testing.assert_allclose(
        position_grads(grads, rows, pooling),
        twin_table.position_grads(grads, rows, pooling),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize(("mode", "name"), [(SUM, "sum"), (MEAN, "mean"), (MAX, "max")])
def test_pooled_features_equal_their_bags_bit_for_bit(mode: int, name: Any) -> None:
    pooling, rows = pooling_of([mode, mode, mode], 4, 7)
    out, largest = pool(rows, pooling)
    grads = numbers(3, pooling.size)
    spreads = spread(grads, pooling, len(rows), largest)
    for (first, dim, _, at, step), bounds in zip(pooling.layout, pooling.bounds, strict=True):
        mine = rows[first : first + ROWS * dim].reshape(ROWS, dim)
        inverse = pooling.inverse[bounds[0] : bounds[-1]]
        cells = at + np.arange(4)[:, None] * step + np.arange(dim)
        bags, chosen = gather_bags(mine, inverse, bounds - bounds[0], mode=name)
        assert np.array_equal(out[cells], bags)
        alone = spread_bags(
            grads[cells], inverse, bounds - bounds[0], mode=name, count=ROWS, chosen=chosen
        )
        assert np.array_equal(spreads[first : first + ROWS * dim], alone.reshape(-1))


def test_features_with_wrong_bounds_are_found() -> None:
    bounds = np.array([[0, 1, 3], [1, 1, 3], [0, 2, 2], [0, 4, 3], [0, 0, 3]])
    assert wrong_bounds(bounds, np.array([3] * 5)).tolist() == [1, 2, 3]
