# SPDX-License-Identifier: Apache-2.0
"""Rows as bfloat16, float16 and int8: equal to the twins, within their error, and unbiased."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.batches import numbers
from tests.kernels.strange_floats import MAX_FLOAT, finite, one_value, values_of

from fleetlight.kernels import from_bfloat16, from_int8, to_bfloat16, to_float16, to_int8
from fleetlight.kernels.codecs import twin_codecs

Floats = NDArray[np.float32]
#: from rows and a seed to the rows that arrive
Carried = Callable[[Floats, int | None], Floats]


def carried_bf16(rows: Floats, seed: int | None = None) -> Floats:
    return from_bfloat16(to_bfloat16(rows))


def carried_fp16(rows: Floats, seed: int | None = None) -> Floats:
    return to_float16(rows, seed).astype(np.float32)


def carried_int8(rows: Floats, seed: int | None = None) -> Floats:
    return from_int8(*to_int8(rows, seed))


FORMS: dict[str, Carried] = {"bf16": carried_bf16, "fp16": carried_fp16, "int8": carried_int8}
every_form = pytest.mark.parametrize("carried", FORMS.values(), ids=FORMS)
seeded_forms = pytest.mark.parametrize(
    "carried", [carried_fp16, carried_int8], ids=["fp16", "int8"]
)


def grids(of: st.SearchStrategy[float]) -> st.SearchStrategy[Floats]:
    """Up to 12 rows of up to 9 values."""
    shapes = st.tuples(st.integers(0, 12), st.integers(1, 9))

    def filled(shape: tuple[int, int]) -> st.SearchStrategy[Floats]:
        size = shape[0] * shape[1]
        return st.lists(of, min_size=size, max_size=size).map(lambda v: values_of(v).reshape(shape))

    return shapes.flatmap(filled)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(grids(one_value))
def test_half_precision_rows_equal_the_twins(rows: Floats) -> None:
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(carried_bf16(rows), twin_codecs.to_bfloat16(rows))
        np.testing.assert_array_equal(carried_fp16(rows), twin_codecs.to_float16(rows))


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(grids(one_value), st.sampled_from([None, 0, 7, 2**62]))
def test_int8_rows_equal_the_twin(rows: Floats, seed: int | None) -> None:
    with np.errstate(all="ignore"):
        for ours, twin in zip(to_int8(rows, seed), twin_codecs.to_int8(rows, seed), strict=True):
            np.testing.assert_array_equal(ours, twin)


@settings(deadline=None, max_examples=50)
@given(grids(finite), st.sampled_from([None, 3]))
def test_errors_are_bounded(rows: Floats, seed: int | None) -> None:
    # random rounding may take the farther of two values
    part = 0.5 if seed is None else 1.0
    sizes = np.abs(rows)
    bounds = {
        "bf16": sizes * 2.0**-8,
        "fp16": part * np.maximum(sizes * 2.0**-10, 2.0**-24),
        "int8": part * 1.0001 * np.broadcast_to(sizes.max(1, keepdims=True) / 127, rows.shape),
    }
    for name, bound in bounds.items():
        inside = sizes <= 65504 if name == "fp16" else sizes >= 0
        assert (np.abs(FORMS[name](rows, seed) - rows) <= bound + 2e-36)[inside].all(), name


@every_form
@settings(deadline=None, max_examples=50)
@given(rows=grids(one_value))
def test_rows_that_arrived_are_carried_exactly(carried: Carried, rows: Floats) -> None:
    """So a worker may send the very values that it has counted as sent."""
    with np.errstate(all="ignore"):
        once = carried(rows, None)
        np.testing.assert_array_equal(carried(once, None), once)


@seeded_forms
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-7])
def test_random_rounding_is_unbiased(carried: Carried, scale: float) -> None:
    """float16 rounds values of 1e-7 to multiples of 6e-8: to the nearest, they would be wrong."""
    row = numbers(1, 8) * np.float32(scale)
    row[0] = scale * 4
    many = np.tile(row, (5000, 1))
    arrived = np.concatenate([carried(many, seed).astype(np.float64) for seed in range(10)])
    deviation = arrived.std(axis=0) / np.sqrt(len(arrived))
    error = np.abs(arrived.mean(axis=0) - row)
    assert (error <= 5 * deviation + 2e-5 * np.abs(row)).all(), error / (deviation + 1e-30)
    assert (deviation > 0).any()


@seeded_forms
def test_a_seed_gives_the_same_values_again(carried: Carried) -> None:
    rows = numbers(2, 64).reshape(8, 8)
    np.testing.assert_array_equal(carried(rows, 5), carried(rows, 5))
    assert (carried(rows, 5) != carried(rows, 6)).any()


@every_form
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("seed", [None, 1])
def test_values_that_are_not_finite_stay_so(carried: Carried, bad: float, seed: int | None) -> None:
    rows = numbers(0, 12).reshape(3, 4)
    rows[1, 2] = bad
    arrived = carried(rows, seed)
    assert np.isfinite(arrived[[0, 2]]).all()
    assert not np.isfinite(arrived[1, 2])
    if carried is not carried_int8:
        np.testing.assert_array_equal(arrived[1, 2], np.float32(bad))


def test_a_nan_with_only_low_bits_stays_one() -> None:
    rows = np.array([[0x7F800001, 0xFF800001]], np.uint32).view(np.float32)
    assert np.isnan(carried_bf16(rows)).all()
    assert np.isnan(carried_fp16(rows)).all()


@pytest.mark.parametrize(
    ("carried", "most"),
    [(carried_bf16, 3.3895314e38), (carried_fp16, 65504.0), (carried_int8, 3.4026e38)],
    ids=FORMS,
)
@pytest.mark.parametrize("seed", [None, 1])
def test_finite_values_beyond_the_range_become_the_largest(
    carried: Carried, most: float, seed: int | None
) -> None:
    rows = np.array([[MAX_FLOAT, -MAX_FLOAT]], np.float32)
    np.testing.assert_allclose(carried(rows, seed), [[most, -most]], rtol=1e-4)
    if carried is carried_fp16:
        near = np.array([[65505.0, -65535.9, 65519.0]], np.float32)
        assert carried(near, seed).tolist() == [[65504.0, -65504.0, 65504.0]]


@every_form
@pytest.mark.parametrize("seed", [None, 1])
def test_no_rows_are_no_rows(carried: Carried, seed: int | None) -> None:
    assert carried(np.empty((0, 3), np.float32), seed).shape == (0, 3)


@every_form
def test_rows_in_another_order_of_memory_are_carried(carried: Carried) -> None:
    rows = numbers(3, 12).reshape(4, 3)
    np.testing.assert_array_equal(carried(rows.T, 1), carried(np.ascontiguousarray(rows.T), 1))
