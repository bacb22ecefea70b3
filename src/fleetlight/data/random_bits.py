# SPDX-License-Identifier: Apache-2.0
"""Random numbers without state: a pure function of numbers, the same on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53


def mixed(values: Bits) -> Bits:
    """SplitMix64: a bijection of 64-bit numbers that spreads close ones far apart."""
    values = values + _STEP
    values ^= values >> np.uint64(30)
    values *= _FIRST
    values ^= values >> np.uint64(27)
    values *= _SECOND
    values ^= values >> np.uint64(31)
    return values


def key_of(*parts: int) -> np.uint64:
    """One key for a sequence of whole numbers."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = mixed(state ^ np.array([part % 2**64], np.uint64))
    return only(state)


def only(values: Bits) -> np.uint64:
    """The only number in an array."""
    value: np.uint64 = values[0]
    return value


def lanes(rows: Bits, count: int) -> Bits:
    """`count` independent numbers for each row."""
    steps = np.arange(count, dtype=np.uint64) * _STEP
    return mixed(rows[:, None] + steps)


def uniform(bits: Bits) -> NDArray[np.float64]:
    """Floats in [0, 1), with all 53 bits."""
    floats: NDArray[np.float64] = (bits >> np.uint64(11)) * _UNIT
    return floats


def below(bits: Bits, limits: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Whole numbers in [0, limits)."""
    return (uniform(bits) * limits).astype(np.int64)
