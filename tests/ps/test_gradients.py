# SPDX-License-Identifier: Apache-2.0
"""Gradients: their mean over workers, their scaling, and the check for finite values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.ps.serving import ids_of, plan, rows_of

from fleetlight.ps.dtypes import flat_array
from fleetlight.ps.gradients import Gradients, TablePart, dense_square, mean, not_finite, scaled
from fleetlight.ps.placement import Block, BlockSlice


def block(dtype: str = "float32") -> Block:
    return Block(0, 0, dtype, (BlockSlice(0, 0, 2, 0), BlockSlice(1, 0, 1, 2)))


def dense(values: list[float], dtype: str = "float32") -> Any:
    return flat_array(torch.tensor(values).to(getattr(torch, dtype)))


def gradients(
    tables: dict[int, TablePart], values: list[float] | None, absent: set[int], dtype: str
) -> Gradients:
    arrays = None if values is None else [dense(values, dtype)]
    return Gradients(tables, arrays, [block(dtype)], frozenset(absent))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_mean_is_over_all_workers(dtype: str) -> None:
    first = gradients({0: TablePart(ids_of([1, 2]), rows_of([2, 4]))}, [1, 2, 3], {0}, dtype)
    second = gradients({1: TablePart(ids_of([1]), rows_of([6]))}, None, set(), dtype)
    third = gradients({0: TablePart(ids_of([2]), rows_of([8]))}, [2, 1, 0], {0, 1}, dtype)
    fourth = gradients({}, [1, 1, 1], {0}, dtype)
    found = mean([first, second, third, fourth])
    # the table sums the rows of one id later
    assert found.tables[0].ids.tolist() == [1, 2, 2]
    assert found.tables[0].rows[:, 0].tolist() == [0.5, 1, 2]
    assert found.tables[1].rows[:, 0].tolist() == [1.5]
    assert found.dense is not None
    np.testing.assert_array_equal(found.dense[0], dense([1, 1, 1], dtype))
    assert found.absent == {0}
    # the inputs are unchanged
    np.testing.assert_array_equal(first.tables[0].rows, rows_of([2, 4]))
    assert first.dense is not None
    np.testing.assert_array_equal(first.dense[0], dense([1, 2, 3], dtype))


def test_mean_of_one_worker_copies_nothing() -> None:
    only = gradients({}, [1, 2, 3], set(), "float32")
    assert mean([only]) is only


def test_half_precision_is_summed_in_float32() -> None:
    parts = [gradients({}, [60000, 60000, 0.001], set(), "float16") for _ in range(3)]
    found = mean(parts)
    assert found.dense is not None
    np.testing.assert_array_equal(found.dense[0], dense([60000, 60000, 0.001], "float16"))


def test_mean_concatenates_counts_without_scaling() -> None:
    one = TablePart(ids_of([1]), rows_of([1]), rows_of([3])[:, 0], rows_of([1])[:, 0])
    two = TablePart(ids_of([2]), rows_of([1]), rows_of([5])[:, 0], rows_of([0])[:, 0])
    parts = [gradients({0: part}, None, set(), "float32") for part in (one, two)]
    found = mean(parts).tables[0]
    assert found.shows is not None
    assert found.clicks is not None
    # counts are not divided by the number of workers
    assert (found.shows.tolist(), found.clicks.tolist()) == ([3, 5], [1, 0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaled_does_not_change_its_input(dtype: str) -> None:
    given = gradients({0: TablePart(ids_of([1]), rows_of([4]))}, [2, 4, 8], set(), dtype)
    found = scaled(given, 0.5)
    assert found.dense is not None
    np.testing.assert_array_equal(found.dense[0], dense([1, 2, 4], dtype))
    assert found.tables[0].rows.tolist() == [[2, 2]]
    assert given.tables[0].rows.tolist() == [[4, 4]]
    assert dense_square(given) == 4 + 16 + 64
    assert dense_square(gradients({}, None, set(), dtype)) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_not_finite_names_the_first_bad_gradient(value: float, dtype: str) -> None:
    known = plan(dense=[*plan().dense, *plan().dense])
    fine = {0: TablePart(ids_of([1, 2]), rows_of([3e38, 3e38]))}
    # finite values whose sum overflows are fine
    assert not_finite(gradients(fine, [3e38, 3e38, 1], set(), dtype), known) is None
    assert not_finite(gradients(fine, None, set(), dtype), known) is None
    bad = {**fine, 1: TablePart(ids_of([1]), rows_of([value]))}
    assert not_finite(gradients(bad, [1, 2, 3], set(), dtype), known) == "table 'items'"
    assert not_finite(gradients(fine, [1, 2, value], set(), dtype), known) == "parameter 'bias'"
