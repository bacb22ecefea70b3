# SPDX-License-Identifier: Apache-2.0
"""`PlantedModel`: the hidden model that labels generated clicks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetlight.data.random_bits import key_of, lanes
from fleetlight.kernels.ids.hashing import mix

Floats = NDArray[np.float64]

#: shares of the variance: numbers, ids, pairs of ids
_DENSE, _IDS, _PAIRS = 0.3, 0.62, 0.08
_MAX_PAIRS = 2
#: spread of the log-odds, and share of clicks: the best AUC is near 0.8, as on real logs
_SPREAD, _CLICKS = 1.35, 0.25


class PlantedModel:
    """log-odds = numbers x weights + the effects of ids + products of effects of some pairs.

    The effect of an id is a pure function of the id. Fields with many ids have small weights,
    since no model can learn rare ids from a few million records. Pairs are made of the fields
    with the fewest ids.
    """

    def __init__(self, sizes: Sequence[int], dense_fields: int, seed: int) -> None:
        rng = np.random.default_rng(int(key_of(seed, 3)))
        self._dense = _scaled(rng.normal(size=dense_fields), _DENSE)
        self._ids = _scaled(1.0 / np.log(np.asarray(sizes, np.float64) + 2.0), _IDS)
        few = np.argsort(sizes, kind="stable")[: 2 * _MAX_PAIRS]
        self._left, self._right = few[0 : len(few) // 2 * 2 : 2], few[1::2]
        self._pairs = _scaled(np.ones(len(self._left)), _PAIRS)
        self._single, self._paired = lanes(np.array([key_of(seed, 4)]), 2)[0]
        self._scale, self._bias = 1.0, 0.0

    def fit(self, dense: Floats, ids: NDArray[np.int64]) -> None:
        """Scale the log-odds so that these records have the intended spread and share of clicks."""
        raw = self._raw(dense, ids)
        self._scale = _SPREAD / max(float(raw.std()), 1e-9)
        self._bias = _bias_for(raw * self._scale, _CLICKS)

    def probabilities(self, dense: Floats, ids: NDArray[np.int64]) -> Floats:
        """The probability of a click for each record."""
        return _sigmoid(self._raw(dense, ids) * self._scale + self._bias)

    def _raw(self, dense: Floats, ids: NDArray[np.int64]) -> Floats:
        left = _effects(ids[:, self._left], self._paired)
        right = _effects(ids[:, self._right], self._paired)
        of_pairs = (left * right) @ self._pairs
        of_ids = _effects(ids, self._single) @ self._ids
        raw: Floats = dense @ self._dense + of_ids + of_pairs
        return raw


def _effects(ids: NDArray[np.int64], key: np.uint64) -> Floats:
    """The effect of each id; mean 0 and variance 1 over many ids."""
    bits = mix(ids.view(np.uint64) ^ key)
    halves = (bits >> np.uint64(32)) + (bits & np.uint64(2**32 - 1))
    centred: Floats = halves * 2.0**-32 - 1.0
    return centred * math.sqrt(6.0)


def _scaled(weights: Floats, variance: float) -> Floats:
    """The weights, scaled so that their squares add up to `variance`."""
    total = float(weights @ weights)
    return weights * np.sqrt(variance / total) if total else weights


def _sigmoid(x: Floats) -> Floats:
    probabilities: Floats = 1.0 / (1.0 + np.exp(-x))
    return probabilities


def _bias_for(raw: Floats, share: float) -> float:
    """The constant that makes the mean probability of these log-odds `share`."""
    low, high = -30.0, 30.0
    for _ in range(50):
        middle = (low + high) / 2
        too_many = float(_sigmoid(raw + middle).mean()) > share
        low, high = (low, middle) if too_many else (middle, high)
    return low
