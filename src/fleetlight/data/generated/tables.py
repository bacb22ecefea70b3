# SPDX-License-Identifier: Apache-2.0
"""Generated tables: `ClickLog` in Criteo's shape, and `RandomTable`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fleetlight.data.generated.distributions import Zipf
from fleetlight.data.random_bits import Bits, key_of, lanes, uniform
from fleetlight.data.records import BatchedDataset, Indices, Record
from fleetlight.errors import ConfigError
from fleetlight.kernels.ids.hashing import mix
from fleetlight.observe.evaluation import auc

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


Floats = NDArray[np.float64]

#: ids of the smallest field, where `vocabulary` names the largest only
_MIN_VOCABULARY = 10
#: records made at once: few enough for the processor's cache
_CHUNK = 2_048
#: records on which the hidden model is scaled
_FITTED = 8_192


class ClickLog(BatchedDataset[Record]):
    """Generated clicks: 13 numbers, 26 ids that follow Zipf's law, a label from a hidden model.

    Record i is a pure function of `seed` and `start + i`. So logs with one seed and different
    starts are parts of one endless log, for training and testing. `best_auc` is the AUC of the
    hidden model itself on these records; a trained model comes near, and beats it by luck only.

    Args:
        samples: the number of records.
        seed: the seed of the hidden model and of all records.
        start: the number of the first record.
        sparse_fields: the number of ids of a record; by default 26.
        dense_fields: the number of floats of a record.
        vocabulary: how many ids each field has, or the largest one; then the others have fewer,
            down to 10.
        zipf: how steeply the frequency of ids falls; 0: not at all.

    Raises:
        ConfigError: an argument is out of range.

    Example:
        >>> clicks = fleet.data.ClickLog(1000)
        >>> dense, ids, label = next(iter(clicks.loader(64)))
        >>> dense.shape, ids.shape, label.shape
        (torch.Size([64, 13]), torch.Size([64, 26]), torch.Size([64]))
    """

    generated = True

    def __init__(
        self,
        samples: int,
        *,
        seed: int = 0,
        start: int = 0,
        sparse_fields: int | None = None,
        dense_fields: int = 13,
        vocabulary: int | Sequence[int] = 200_000,
        zipf: float = 1.1,
    ) -> None:
        """Make a log.

        `vocabulary`: how many ids each field has, or the largest one; then the others have fewer,
        down to 10. `zipf`: how steeply the frequency of ids falls; 0: not at all.
        """
        sizes = _sizes(vocabulary, sparse_fields)
        if samples < 0 or start < 0 or dense_fields < 0:
            raise ConfigError(f"ClickLog: got {samples=}, {start=}, {dense_fields=}; expected >= 0")
        self.name = f"click log of {samples} records (generated)"
        self.sizes = sizes
        self._samples, self._start, self._seed = samples, start, seed
        self._dense_fields = dense_fields
        self._zipf = Zipf(sizes, zipf)
        self._record_key = key_of(seed, 1)
        #: where the ids of each field start, before they are hashed
        self._field_keys = lanes(np.array([key_of(seed, 2)]), len(sizes))[0]
        self._planted = PlantedModel(sizes, dense_fields, seed)
        self._planted.fit(*self._inputs(np.arange(_FITTED))[:2])

    def __len__(self) -> int:
        return self._samples

    def batch(self, indices: Indices) -> Record:
        parts = list(self._parts(indices))
        dense, ids, labels, _ = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return Record(
            torch.from_numpy(dense).float(),
            torch.from_numpy(ids),
            torch.from_numpy(labels).float(),
        )

    def probabilities(self, indices: Indices) -> Tensor:
        """The hidden model's probability of a click for these records."""
        parts = [part[-1] for part in self._parts(indices)]
        return torch.from_numpy(np.concatenate(parts))

    @functools.cached_property
    def best_auc(self) -> float:
        """The AUC of the hidden model, over all records of this log."""
        parts = [part[2:] for part in self._parts(np.arange(self._samples))]
        labels, probabilities = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        return auc(probabilities, labels, lambda mine, op: mine, lambda mine: [mine])

    def _parts(
        self, indices: Indices
    ) -> Iterator[tuple[Floats, NDArray[np.int64], NDArray[np.bool_], Floats]]:
        """Numbers, ids, labels and probabilities of some records, a few thousand at a time."""
        numbers = np.asarray(indices, np.int64)
        if np.any((numbers < 0) | (numbers >= self._samples)):
            raise IndexError(
                f"{self.name}: got indices from {numbers.min()} to {numbers.max()}, expected 0 to "
                f"{self._samples - 1}"
            )
        numbers = numbers + self._start
        for first in range(0, max(1, len(numbers)), _CHUNK):
            dense, ids, draws = self._inputs(numbers[first : first + _CHUNK])
            probabilities = self._planted.probabilities(dense, ids)
            yield dense, ids, draws < probabilities, probabilities

    def _inputs(self, numbers: NDArray[np.int64]) -> tuple[Floats, NDArray[np.int64], Floats]:
        """Numbers and ids of some records, and the uniform draws that decide their labels."""
        rows: Bits = mix(numbers.astype(np.uint64) ^ self._record_key)
        fields = len(self.sizes)
        draws = uniform(lanes(rows, 1 + fields + self._dense_fields))
        ranks = self._zipf.ranks(draws[:, 1 : 1 + fields])
        ids = mix(self._field_keys + ranks.astype(np.uint64)).view(np.int64)
        # skewed like logarithms of counts; mean 0, variance 1
        dense = -np.log1p(-draws[:, 1 + fields :]) - 1.0
        return dense, ids, draws[:, 0]


def _sizes(vocabulary: int | Sequence[int], fields: int | None) -> tuple[int, ...]:
    """How many ids each field has."""
    if isinstance(vocabulary, int):
        spread = np.geomspace(vocabulary, min(_MIN_VOCABULARY, vocabulary), fields or 26)
        sizes = tuple(int(size) for size in spread[::-1].round())
    else:
        sizes = tuple(int(size) for size in vocabulary)
    if fields not in (None, len(sizes)) or min(sizes, default=0) < 1:
        raise ConfigError(
            f"ClickLog: got vocabulary={vocabulary} for sparse_fields={fields}; expected a size of "
            "1 or more for each field, or the size of the largest"
        )
    return sizes


class RandomTable(Dataset[tuple[Tensor, int]]):
    """Generated rows: `features` uniform floats in 0..1 and a label below `classes`.

    The label is the largest of `classes` hidden weighted sums of the row, so a model can learn it.

    Args:
        rows: the number of rows.
        features: the number of floats of a row.
        classes: the number of labels.
        seed: the seed of all values.

    Example:
        >>> row, label = fleet.data.RandomTable(rows=100)[0]
        >>> row.shape, label in (0, 1)
        (torch.Size([32]), True)
    """

    generated = True

    def __init__(
        self, rows: int = 12_800, features: int = 32, classes: int = 2, *, seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        table = rng.random((rows, features), dtype=np.float32)
        # Centred rows: otherwise the class with the largest weights would win nearly always.
        hidden = rng.standard_normal((features, classes), dtype=np.float32)
        self.name = f"random table {rows} x {features} (generated)"
        self._rows = torch.from_numpy(table)
        self._labels: list[int] = ((table - 0.5) @ hidden).argmax(axis=1).tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._rows[index], self._labels[index]

    def __repr__(self) -> str:
        return f"<{self.name}>"
