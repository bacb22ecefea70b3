# SPDX-License-Identifier: Apache-2.0
"""`gather` copies rows to samples; `sum_by` sums gradients of samples by row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.batches import numbers, same

from fleetlight.errors import ConfigError
from fleetlight.kernels import gather, sum_by, twin_table


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), max_size=40), st.integers(1, 20))
def test_gather_and_sum_by_equal_the_twins(positions: list[int], dim: int) -> None:
    inverse = np.array(positions, np.int32)
    rows, grads = numbers(0, 7, dim), numbers(1, len(inverse), dim)
    assert same(gather(rows, inverse), twin_table.gather(rows, inverse))
    assert same(sum_by(grads, inverse, 7), twin_table.sum_by(grads, inverse, 7))


def test_results_are_written_to_out() -> None:
    out = np.full((2, 3), 9, np.float32)
    assert sum_by(np.ones((3, 3)), [0, 0, 0], 2, out=out) is out
    assert out.tolist() == [[3, 3, 3], [0, 0, 0]]


@pytest.mark.parametrize("position", [-1, 2])
def test_positions_out_of_range_are_refused(position: int) -> None:
    with pytest.raises(ConfigError, match=r"in 2 rows, expected 0\.\.1"):
        gather(np.ones((2, 3)), [position])
    with pytest.raises(ConfigError, match=r"in 2 rows, expected 0\.\.1"):
        sum_by(np.ones((1, 3)), [position], 2)


def test_mismatched_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"gradients have the shape \[2, 3\], expected \[1, 3\]"):
        sum_by(np.ones((2, 3)), [0], 1)
    with pytest.raises(ConfigError, match=r"out is float32\[4, 3\], expected .*\[1, 3\]"):
        gather(np.ones((2, 3)), [0], out=np.ones((4, 3), np.float32))
