# SPDX-License-Identifier: Apache-2.0
"""Whether all values are finite, as NumPy says it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetlight.kernels import all_finite

MOST = float(np.finfo(np.float32).max)
values = st.lists(
    st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, MOST, -MOST, 1e-45])), max_size=40
)


@settings(deadline=None)
@given(values)
def test_it_says_what_numpy_says(found: list[float]) -> None:
    array = np.array(found, np.float32)
    assert all_finite(array) == bool(np.isfinite(array).all())
    wide = np.array([found, found], np.float64)
    assert all_finite(wide) == bool(np.isfinite(wide).all())


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_is_found_anywhere(bad: float) -> None:
    array = np.full((5, 7), MOST, np.float32)
    assert all_finite(array)
    array[4, 6] = bad
    assert not all_finite(array)
    assert not all_finite(array.T)
    assert all_finite(array[:4])
    array.flags.writeable = False
    assert not all_finite(array)
