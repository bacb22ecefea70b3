# SPDX-License-Identifier: Apache-2.0
"""Random rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from fleetlight.data.readers.random_table import RandomTable


def test_a_batch_has_the_shape_of_the_tuning_example() -> None:
    x, y = next(iter(DataLoader(RandomTable(), batch_size=128)))
    assert (x.shape, x.dtype) == ((128, 32), torch.float32)
    assert (y.shape, y.dtype) == ((128,), torch.int64)
    assert 0 <= x.min() < 0.01 < 0.99 < x.max() < 1


def test_it_is_labelled_as_generated() -> None:
    assert RandomTable.generated
    assert repr(RandomTable(10, 3)) == "<random table 10 x 3 (generated)>"


def test_rows_depend_on_the_seed_only() -> None:
    assert torch.equal(RandomTable(5, seed=1)[3][0], RandomTable(5, seed=1)[3][0])
    assert not torch.equal(RandomTable(5, seed=1)[3][0], RandomTable(5, seed=2)[3][0])


@pytest.mark.parametrize("classes", [2, 5])
def test_every_class_appears(classes: int) -> None:
    table = RandomTable(2000, classes=classes)
    counts = np.bincount([table[index][1] for index in range(2000)])
    assert counts.size == classes
    assert counts.min() > 2000 / classes / 3


def test_the_labels_can_be_learnt() -> None:
    x, y = next(iter(DataLoader(RandomTable(4000), batch_size=4000)))
    signs = y.float().mul(2).sub(1)
    weights = torch.linalg.lstsq(x[:3000] - 0.5, signs[:3000, None]).solution
    right = ((x[3000:] - 0.5) @ weights > 0).squeeze().eq(y[3000:] == 1)
    assert right.float().mean() > 0.9


def test_it_ends_like_a_sequence() -> None:
    table = RandomTable(3)
    assert len(list(table)) == len(table) == 3  # type: ignore[call-overload]
