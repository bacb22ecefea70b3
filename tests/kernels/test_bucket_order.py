# SPDX-License-Identifier: Apache-2.0
"""The order of checkpoints, whatever the ids."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.kernels.batches import STRANGE

from fleetlight.kernels import RowTable, buckets, twins
from fleetlight.kernels.bucket_order import _sort_buckets


def of_one_bucket(count: int) -> NDArray[np.int64]:
    """Ids that all have bucket 0."""
    candidates = np.arange(count * 2**14 * 2)
    return candidates[twins.buckets(candidates) == 0][:count]


def sawtooth(count: int) -> NDArray[np.int64]:
    return np.arange(count) % 7


SHAPES = {
    "random": np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1000),
    "ascending": np.arange(1000),
    "descending": np.arange(1000)[::-1].copy(),
    "organ pipe": np.minimum(np.arange(1000), np.arange(1000)[::-1]),
    "few": sawtooth(1000),
    "one": np.zeros(1000, np.int64),
    "strange": np.array(STRANGE * 30),
    "nothing": np.zeros(0, np.int64),
}


@pytest.mark.parametrize("name", SHAPES)
def test_sorts_any_bucket(name: str) -> None:
    ids = SHAPES[name].copy()
    rows = np.arange(len(ids), dtype=np.int32)
    _sort_buckets(np.array([0, len(ids), len(ids)]), rows, ids)
    assert (ids == np.sort(SHAPES[name])).all()
    assert (SHAPES[name][rows] == ids).all()
    assert len(np.unique(rows)) == len(rows)


def test_rows_of_one_bucket_are_sorted_by_id() -> None:
    ids = of_one_bucket(200)
    table = RowTable(1, "sgd")
    table.insert(np.random.default_rng(0).permutation(ids))
    order = table.in_bucket_order()
    assert (order.ids == ids).all()
    assert order.starts.tolist() == [0] + [len(ids)] * 2**14
    assert (table.find(ids) == order.rows).all()


def test_starts_say_where_each_bucket_is() -> None:
    table = RowTable(1, "sgd")
    table.insert(np.arange(40_000))
    order = table.in_bucket_order()
    for bucket in (0, 1, 77, 2**14 - 1):
        inside = order.ids[order.starts[bucket] : order.starts[bucket + 1]]
        assert (buckets(inside) == bucket).all()
        assert len(inside) == (buckets(np.arange(40_000)) == bucket).sum()
