# SPDX-License-Identifier: Apache-2.0
"""Random numbers without state: a pure function of numbers, the same on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlight.kernels.ids.hashing import GAMMA, mix

Bits = NDArray[np.uint64]

_UNIT = 2.0**-53


def key_of(*parts: int) -> np.uint64:
    """One key for a sequence of whole numbers."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = mix(state ^ np.array([part % 2**64], np.uint64))
    return only(state)


def only(values: Bits) -> np.uint64:
    """The only number in an array."""
    value: np.uint64 = values[0]
    return value


def lanes(rows: Bits, count: int) -> Bits:
    """`count` independent numbers for each row."""
    steps = np.arange(count, dtype=np.uint64) * GAMMA
    return mix(rows[:, None] + steps)


def uniform(bits: Bits) -> NDArray[np.float64]:
    """Floats in [0, 1), with all 53 bits."""
    floats: NDArray[np.float64] = (bits >> np.uint64(11)) * _UNIT
    return floats


def below(bits: Bits, limits: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Whole numbers in [0, limits)."""
    return (uniform(bits) * limits).astype(np.int64)
