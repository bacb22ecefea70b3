# SPDX-License-Identifier: Apache-2.0
"""`SideBySide` equals `np.stack`."""

import numpy as np
import pytest

from fleetlight.kernels.columns import SideBySide, follow_each_other


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("shape", [(1, 0), (1, 5), (3, 1), (4, 9), (7, 1030), (26, 2500)])
def test_columns_become_rows(shape: tuple[int, int], floats: bool) -> None:
    columns = list(np.random.default_rng(0).integers(-(2**40), 2**40, shape))
    columns[0] = columns[0].astype(np.int32)
    # one that is not aligned
    whole = b"1" + columns[-1].tobytes()
    columns[-1] = np.ndarray(shape[1:], columns[-1].dtype, whole, offset=1)
    expected = np.stack(columns, 1).astype(np.float32 if floats else np.int64)
    found = SideBySide(columns, floats=floats)
    for start, stop in ((0, None), (0, shape[1]), (1, 40), (max(0, shape[1] - 1), shape[1] + 9)):
        matrix = found.rows(start, stop)
        assert matrix.dtype == expected.dtype
        np.testing.assert_array_equal(matrix, expected[start:stop])


@pytest.mark.parametrize("records", [[], [5], [3, 4, 5], [3, 4, 6], [4, 3], [2, 2]])
def test_records_follow_each_other(records: list[int]) -> None:
    given = np.array(records, np.int64)
    assert follow_each_other(given) == bool((np.diff(given) == 1).all())
