# SPDX-License-Identifier: Apache-2.0
"""Zipf ranks and the alias sampler."""

import numpy as np
import pytest

from fleetlight.data.generated.distributions import AliasSampler, Zipf
from fleetlight.errors import ConfigError


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 1.2, 2.0])
def test_frequencies_fall_with_the_power(exponent: float) -> None:
    draws = (np.arange(200_000) + 0.5) / 200_000
    ranks = Zipf([1000], exponent).ranks(draws[:, None])[:, 0]
    counts = np.bincount(ranks, minlength=1000)
    edges = np.arange(1, 1002.0)
    areas = np.diff(np.log(edges) if exponent == 1 else edges ** (1 - exponent) / (1 - exponent))
    assert np.abs(counts - areas / areas.sum() * 200_000).max() <= 1.01


def test_each_column_has_its_size() -> None:
    ranks = Zipf([1, 7, 10**12], 1.1).ranks(np.random.default_rng(0).random((5_000, 3)))
    assert ranks.min(0).tolist() == [0, 0, 0]
    assert ranks.max(0)[:2].tolist() == [0, 6]
    assert 10**6 < ranks[:, 2].max() < 10**12


@pytest.mark.parametrize("exponent", [1.0, 1.1])
def test_the_largest_draw_stays_inside(exponent: float) -> None:
    assert Zipf([10**9], exponent).ranks(np.array([[1.0]])).item() == 10**9 - 1


def test_a_negative_exponent_is_refused() -> None:
    with pytest.raises(ConfigError, match="zipf=-1, expected 0"):
        Zipf([3], -1)


@pytest.mark.parametrize(
    "weights", [[1.0], [3, 1], [0, 5, 0, 1], [0.1] * 7, [2.0**-i for i in range(40)]]
)
def test_alias_sampler_draws_exact_shares(weights: list[float]) -> None:
    weighted = AliasSampler(np.array(weights, np.float64))
    # evenly spread bits: the share of bits per number equals its share of the bins
    even = np.arange(400_000, dtype=np.uint64) * np.uint64(2**64 // 400_000)
    counts = np.bincount(weighted.draw(even), minlength=len(weights))
    shares = np.array(weights) / np.sum(weights)
    assert np.abs(counts / len(even) - shares).max() < 1e-4
    assert not counts[shares == 0].any()
