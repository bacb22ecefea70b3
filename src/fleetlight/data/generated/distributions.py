# SPDX-License-Identifier: Apache-2.0
"""Distributions to draw from: `Zipf` ranks, and any weights by `AliasSampler`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetlight.data.random_bits import Bits, uniform
from fleetlight.errors import ConfigError


class Zipf:
    """Draws ranks 0..size-1 whose frequency falls with the power `exponent`; 0: uniform.

    The share of rank k is the area under x^-exponent from k+1 to k+2. So a draw is one formula,
    without a table, for any size of the vocabulary.
    """

    def __init__(self, sizes: Sequence[int], exponent: float) -> None:
        if exponent < 0:
            raise ConfigError(f"got zipf={exponent}, expected 0 (uniform) or more")
        self._sizes = np.asarray(sizes, np.int64)
        self._power = 1.0 - exponent
        self._last = (self._sizes + 1.0) ** self._power - 1.0

    def ranks(self, draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """Ranks for uniform draws from [0, 1), one column for each size."""
        if self._power == 0:
            places = (self._sizes + 1.0) ** draws
        else:
            places = (1.0 + draws * self._last) ** (1.0 / self._power)
        return np.minimum(places.astype(np.int64), self._sizes) - 1


class AliasSampler:
    """Draws 0..n-1 in proportion to weights, in constant time (Walker's alias method).

    Each number has a bin of the same width. The part of a bin that its own number does not fill
    belongs to one other number, its alias.
    """

    def __init__(self, weights: NDArray[np.float64]) -> None:
        shares = weights * (len(weights) / weights.sum())
        self._own = np.ones(len(weights))
        self._alias = np.arange(len(weights))
        small, large = (np.flatnonzero(part).tolist() for part in (shares < 1, shares >= 1))
        left = shares.tolist()
        while small and large:
            poor, rich = small.pop(), large[-1]
            self._own[poor], self._alias[poor] = left[poor], rich
            left[rich] -= 1.0 - left[poor]
            if left[rich] < 1:
                small.append(large.pop())

    def draw(self, bits: Bits) -> NDArray[np.int64]:
        """One number for each 64 random bits."""
        places = uniform(bits) * len(self._own)
        bins = places.astype(np.int64)
        return np.where(places - bins < self._own[bins], bins, self._alias[bins])
