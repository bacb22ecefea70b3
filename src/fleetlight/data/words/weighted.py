# SPDX-License-Identifier: Apache-2.0
"""`Weighted`: numbers drawn by their weights, at the same cost however many there are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleetlight.data.mixing import Bits, uniform


class Weighted:
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
