# SPDX-License-Identifier: Apache-2.0
"""Batches of ids with repetitions and with the extreme values of int64."""

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

STRANGE = (0, -1, 1, -(2**63), 2**63 - 1)

one_id = st.one_of(st.sampled_from(STRANGE), st.integers(-8, 40), st.integers(-(2**63), 2**63 - 1))


def ids_of(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)


id_batches = st.lists(one_id, max_size=60).map(ids_of)


def numbers(seed: int, *shape: int) -> NDArray[np.float32]:
    """Random float32 numbers without special values."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def same(a: Any, b: Any) -> bool:
    """Whether two arrays agree in type, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
