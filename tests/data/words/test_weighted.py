# SPDX-License-Identifier: Apache-2.0
"""Draws by weight."""

from __future__ import annotations

import numpy as np
import pytest

from fleetlight.data.words.weighted import Weighted


@pytest.mark.parametrize(
    "weights", [[1.0], [3, 1], [0, 5, 0, 1], [0.1] * 7, [2.0**-i for i in range(40)]]
)
def test_shares_are_exact(weights: list[float]) -> None:
    weighted = Weighted(np.array(weights, np.float64))
    # bits spread evenly: each number's share of them is its share of the bins
    even = np.arange(400_000, dtype=np.uint64) * np.uint64(2**64 // 400_000)
    counts = np.bincount(weighted.draw(even), minlength=len(weights))
    shares = np.array(weights) / np.sum(weights)
    assert np.abs(counts / len(even) - shares).max() < 1e-4
    assert not counts[shares == 0].any()
