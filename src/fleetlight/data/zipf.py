# SPDX-License-Identifier: Apache-2.0
"""`Zipf`: ranks of which the first come often and the last hardly ever."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
