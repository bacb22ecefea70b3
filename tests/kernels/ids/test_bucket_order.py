# SPDX-License-Identifier: Apache-2.0
"""The order of rows in checkpoints: by bucket, then by id."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.batches import STRANGE

from fleetlight.kernels import BUCKETS, BucketCount, put_in_bucket_order, twin_table
from fleetlight.kernels.ids.bucket_order import _sort_buckets


def ids_of_one_bucket(count: int) -> NDArray[np.int64]:
    """Ids that all fall into bucket 0."""
    candidates = np.arange(count * 2**14 * 2)
    return candidates[twin_table.buckets(candidates) == 0][:count]


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
def test_ids_of_one_bucket_are_sorted(name: str) -> None:
    ids = SHAPES[name].copy()
    rows = np.arange(len(ids), dtype=np.int32)
    _sort_buckets(np.array([0, len(ids)]), rows, ids)
    assert (ids == np.sort(SHAPES[name])).all()
    assert (SHAPES[name][rows] == ids).all()
    assert len(np.unique(rows)) == len(rows)


def ordered(
    ids: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Return the starts of the buckets, the sorted ids and their former rows."""
    count = BucketCount()
    for some in np.array_split(ids, 3):
        count.add(some)
    sorted_ids, rows = ids.copy(), np.arange(len(ids), dtype=np.int32)
    put_in_bucket_order(count.starts, sorted_ids, rows)
    return count.starts, sorted_ids, rows


@settings(deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=200) | st.permutations(range(60)))
def test_any_ids_are_sorted_by_bucket_and_id(given_ids: list[int]) -> None:
    ids = np.array(given_ids, np.int64)
    starts, in_order, rows = ordered(ids)
    of = twin_table.buckets(ids)
    assert (in_order == ids[np.lexsort((ids, of))]).all()
    assert (ids[rows] == in_order).all()
    assert len(np.unique(rows)) == len(ids)
    assert (starts == np.searchsorted(np.sort(of), np.arange(BUCKETS + 1))).all()


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("count", [200, 0, 1])
def test_ids_that_share_one_bucket(count: int) -> None:
    ids = ids_of_one_bucket(count)
    starts, in_order, _ = ordered(np.random.default_rng(0).permutation(ids))
    assert (in_order == ids).all()
    assert starts.tolist() == [0] + [count] * BUCKETS


def test_many_ids() -> None:
    ids = np.random.default_rng(0).permutation(100_000) * 7919 - 10**9
    starts, in_order, rows = ordered(ids)
    assert (in_order == ids[np.lexsort((ids, twin_table.buckets(ids)))]).all()
    assert (ids[rows] == in_order).all()
    for bucket in (0, 1, 77, BUCKETS - 1):
        inside = in_order[starts[bucket] : starts[bucket + 1]]
        assert len(inside) > 0
        assert (twin_table.buckets(inside) == bucket).all()
