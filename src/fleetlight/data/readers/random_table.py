# SPDX-License-Identifier: Apache-2.0
"""`RandomTable`: rows of random numbers with a class each, for trying and tuning."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset

from fleetlight.data.readers.dataset import Sample


class RandomTable(Dataset[Sample]):
    """Generated rows: `features` uniform floats in 0..1 and a label below `classes`.

    The label is the largest of `classes` hidden weighted sums of the row, so a model can learn it.
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

    def __getitem__(self, index: int) -> Sample:
        return self._rows[index], self._labels[index]

    def __repr__(self) -> str:
        return f"<{self.name}>"
