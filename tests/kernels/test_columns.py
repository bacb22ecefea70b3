# SPDX-License-Identifier: Apache-2.0
"""`side_by_side` equals `np.stack`."""

from __future__ import annotations

import numpy as np
import pytest

from fleetlight.kernels.columns import side_by_side


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("shape", [(1, 0), (1, 5), (3, 1), (26, 1000)])
def test_columns_become_rows(shape: tuple[int, int], floats: bool) -> None:
    columns = list(np.random.default_rng(0).integers(-(2**40), 2**40, shape))
    columns[0] = columns[0].astype(np.int32)
    matrix = side_by_side(columns, floats=floats)
    expected = np.stack(columns, 1).astype(np.float32 if floats else np.int64)
    assert matrix.dtype == expected.dtype
    np.testing.assert_array_equal(matrix, expected)
