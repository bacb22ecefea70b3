# SPDX-License-Identifier: Apache-2.0
"""The Adult census: which people earn more than 50,000 a year."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fleetlight.data.generated.tables import ClickLog
from fleetlight.data.readers.files import find, plain_or_gzip, refuse_absent
from fleetlight.data.readers.lines import table_of
from fleetlight.data.readers.tables.fields import Fields
from fleetlight.data.records import Record, TableDataset
from fleetlight.errors import DataError

_NAMES = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "salary"),
)
#: divisors, for some after a logarithm, that bring all numbers into 0..1
_SCALES = {
    "age": 100.0,
    "fnlwgt": 15.0,
    "education-num": 16.0,
    "capital-gain": 12.0,
    "capital-loss": 12.0,
    "hours-per-week": 100.0,
}
_LOGARITHMIC = ("fnlwgt", "capital-gain", "capital-loss")
_CATEGORIES = tuple(name for name in _NAMES[:-1] if name not in _SCALES)
_FILES = {"train": ("adult.data", "adult.csv"), "test": ("adult.test",)}
_COUNTS = {"train": 32_561, "test": 16_281}
_VALUES = (9, 16, 7, 15, 6, 5, 2, 42)
_LABELS = {b"<=50K": 0.0, b">50K": 1.0}


class Adult(TableDataset[Record]):
    """People: 6 numbers scaled to 0..1, 8 ids, label 1 for more than 50,000 a year.

    Reads `adult.data` (or `adult.csv`; `adult.test` for `train=False`) in `root`, or the file
    `root`. The salt of an id is its field's name; "?" is a value like any other.

    Args:
        root: the folder or the file.
        train: False for the test set.
        stand_in: True generates records where the files are absent.
        seed: the seed of generated records.

    Raises:
        DataError: the file is absent or damaged.

    Example:
        >>> people = fleet.data.Adult("absent", train=False, stand_in=True)
        >>> people[0].dense.shape, people[0].ids.shape
        (torch.Size([6]), torch.Size([8]))
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        train: bool = True,
        *,
        stand_in: bool = False,
        seed: int = 0,
    ) -> None:
        split = "train" if train else "test"
        path = find(Path(root), _FILES[split])
        if path is None:
            refuse_absent(f"Adult {split}", Path(root), plain_or_gzip(_FILES[split]), stand_in)
            super().__init__(f"Adult {split}", _generated(split, seed), generated=True)
        else:
            super().__init__(f"Adult {split}", table_of(path, Adult.parse, _is_header))

    @staticmethod
    def parse(lines: Sequence[bytes]) -> Record:
        """The records of some lines."""
        lines = [line.replace(b", ", b",") for line in lines]
        fields = Fields.of(lines, b",", _NAMES)
        dense = [_scaled(fields, name) for name in _SCALES]
        return Record(torch.cat(dense, 1).float(), fields.only(_CATEGORIES).ids(), _labels(fields))


def _scaled(fields: Fields, name: str) -> torch.Tensor:
    numbers = fields.only([name]).numbers()
    return (numbers.log1p() if name in _LOGARITHMIC else numbers) / _SCALES[name]


def _labels(fields: Fields) -> torch.Tensor:
    # the published test file ends its lines with a full stop
    texts = [text.rstrip(b".") for text in fields[-1:].texts(64)[:, 0].tolist()]
    if unknown := [text for text in texts if text not in _LABELS]:
        raise DataError(f"got the salary {unknown[0].decode()!r}, expected <=50K or >50K")
    return torch.tensor([_LABELS[text] for text in texts])


def _is_header(line: bytes) -> bool:
    return line.startswith((b"age", b"|"))


def _generated(split: str, seed: int) -> Record:
    """Generated records of the same shape."""
    start = 0 if split == "train" else _COUNTS["train"]
    log = ClickLog(
        _COUNTS[split], seed=seed, start=start, dense_fields=len(_SCALES), vocabulary=_VALUES
    )
    return log.batch(np.arange(len(log)))
