# SPDX-License-Identifier: Apache-2.0
"""Conversion of arguments to the arrays that kernels take."""

import numpy as np
import pytest

from fleetlight.errors import ConfigError
from fleetlight.kernels.arrays import as_grid, as_ids, room


def test_matching_arrays_are_not_copied() -> None:
    ids, values = np.arange(3), np.ones((2, 3), np.float32)
    assert np.shares_memory(as_ids(ids), ids)
    assert as_grid(values, 3, "rows") is values
    assert room(values, (2, 3)) is values


def test_other_arrays_are_converted() -> None:
    assert as_ids([[1, 2], [3, 4]]).tolist() == [1, 2, 3, 4]
    assert as_ids([]).dtype == np.int64
    assert as_ids(np.arange(6)[::2]).flags.c_contiguous
    assert as_ids(np.array([2**64 - 1], np.uint64)).tolist() == [-1]
    assert as_grid(np.ones((3, 2)).T, 3, "rows").flags.c_contiguous


def test_errors_name_the_wrong_shape() -> None:
    with pytest.raises(ConfigError, match=r"rows have the shape \[2\], expected \[any, 2\]"):
        as_grid(np.ones(2), 2, "rows")
    with pytest.raises(ConfigError, match=r"out is float64\[1, 2\], expected .*float32\[1, 2\]"):
        room(np.ones((1, 2)), (1, 2))  # type: ignore[arg-type]
