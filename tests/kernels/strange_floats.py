# SPDX-License-Identifier: Apache-2.0
"""Floats with many equal values and with the extreme values of float32."""

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

MAX_FLOAT = float(np.finfo(np.float32).max)
SMALL = (0.0, -0.0, 1e-45, -1e-45, 1e-40, 1e-36, -1e-35)
LARGE = (MAX_FLOAT, -MAX_FLOAT, 3e38, np.inf, -np.inf, np.nan, -np.nan)

finite = st.floats(-1e6, 1e6, width=32)
one_value = st.one_of(
    st.sampled_from([1.0, -1.0, 0.5]), finite, st.sampled_from(SMALL), st.sampled_from(LARGE)
)


def values_of(found: list[float]) -> NDArray[np.float32]:
    return np.array(found, np.float32)


some_values = st.lists(one_value, max_size=40).map(values_of)
