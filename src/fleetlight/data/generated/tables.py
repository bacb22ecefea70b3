# SPDX-License-Identifier: Apache-2.0
"""Generated tables: `ClickLog` in Criteo's shape, and `RandomTable`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fleetlight.data.generated.distributions import Zipf
from fleetlight.data.generated.planted_model import PlantedModel
from fleetlight.data.random_bits import Bits, key_of, lanes, uniform
from fleetlight.data.records import BatchedDataset, Indices, Record
from fleetlight.errors import ConfigError
from fleetlight.kernels.ids.hashing import mix
from fleetlight.observe.evaluation import auc

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
