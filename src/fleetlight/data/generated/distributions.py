# SPDX-License-Identifier: Apache-2.0
"""Distributions to draw from: `Zipf` ranks, and any weights by `AliasSampler`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetlight.data.random_bits import Bits, uniform
from fleetlight.errors import ConfigError


class Zipf:
    """Draws ranks 0..size-1 whose frequency falls with the power `exponent`; 0: all alike.

    Rank k has the share of (k+1)..(k+2) below the curve x^-exponent. So a draw is one formula,
    without a table, however large the vocabulary is.
    """

    def __init__(self, sizes: Sequence[int], exponent: float) -> None:
        if exponent < 0:
            raise ConfigError(f"zipf={exponent}, expected 0 (all alike) or more")
        self._sizes = np.asarray(sizes, np.int64)
        self._power = 1.0 - exponent
        self._last = (self._sizes + 1.0) ** self._power - 1.0

    def ranks(self, draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """The ranks for numbers drawn from 0..1, a column for each size."""
        if self._power == 0:
            places = (self._sizes + 1.0) ** draws
        else:
            places = (1.0 + draws * self._last) ** (1.0 / self._power)
        return np.minimum(places.astype(np.int64), self._sizes) - 1


class AliasSampler:
    """Draws 0..n-1 in proportion to weights (Walker's aliases).

    Each number has a bin of the same width; what a bin has room for, once its own number is in,
    belongs to one other number.
    """

    def __init__(self, weights: NDArray[np.float64]) -> None:
        shares = weights * (len(weights) / weights.sum())
        self._own = np.ones(len(weights))
        self._other = np.arange(len(weights))
        small, large = (np.flatnonzero(part).tolist() for part in (shares < 1, shares >= 1))
        left = shares.tolist()
        while small and large:
            poor, rich = small.pop(), large[-1]
            self._own[poor], self._other[poor] = left[poor], rich
            left[rich] -= 1.0 - left[poor]
            if left[rich] < 1:
                small.append(large.pop())

    def draw(self, bits: Bits) -> NDArray[np.int64]:
        """One number for each of the random bits."""
        places = uniform(bits) * len(self._own)
        bins = places.astype(np.int64)
        return np.where(places - bins < self._own[bins], bins, self._other[bins])
