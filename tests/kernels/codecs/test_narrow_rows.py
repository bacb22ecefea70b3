# SPDX-License-Identifier: Apache-2.0
"""Rows as bfloat16, float16 and int8: equal to the twins, within their error, and unbiased."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.batches import numbers, same
from tests.kernels.strange_floats import MAX_FLOAT, finite, one_value, some_values, values_of

from fleetlight import kernels
from fleetlight.errors import DivergedError
from fleetlight.kernels.codecs import twin_codecs

Floats = NDArray[np.float32]
#: from rows and a seed to the rows that arrive
Carried = Callable[[Floats, int | None], Floats]


def carried_bf16(rows: Floats, seed: int | None = None) -> Floats:
    return kernels.from_bfloat16(kernels.to_bfloat16(rows))


def carried_fp16(rows: Floats, seed: int | None = None) -> Floats:
    return kernels.to_float16(rows, seed).astype(np.float32)


def carried_int8(rows: Floats, seed: int | None = None) -> Floats:
    return kernels.from_int8(*kernels.to_int8(rows, seed))


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
        for ours, twin in zip(
            kernels.to_int8(rows, seed), twin_codecs.to_int8(rows, seed), strict=True
        ):
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


# -- blocks of int8 codes: sent values and error feedback equal the twin bit for bit --------------


def coded(by: Callable[..., None], values: Floats, residual: Floats | None) -> tuple[Any, ...]:
    """Return scales, codes, the values and the error feedback."""
    values, residual = values.copy(), None if residual is None else residual.copy()
    scales = np.full(kernels.block_count(len(values)), -1, np.float32)
    codes = np.full(len(values), -1, np.int8)
    with np.errstate(over="ignore", invalid="ignore"):
        by(values, residual, scales, codes)
    return scales, codes, values, np.zeros(0, np.float32) if residual is None else residual


def decoded(scales: Floats, codes: NDArray[np.int8]) -> Floats:
    total = np.zeros(len(codes), np.float32)
    scales.flags.writeable = codes.flags.writeable = False
    kernels.add_blocks(scales, codes, total)
    return total


@st.composite
def long_values(draw: st.DrawFn) -> Floats:
    """Values that fill some blocks and part of the last one."""
    head, tail = draw(some_values), draw(some_values)
    middle = numbers(len(head), draw(st.sampled_from([0, 1, 255, 256, 257, 600])))
    return np.concatenate([head, middle, tail])


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(long_values(), st.sampled_from([None, 0.0, 1e-3, 3e38]))
def test_codes_equal_the_twin(values: Floats, scale: float | None) -> None:
    residual = None if scale is None else numbers(1, len(values)).clip(-1, 1) * np.float32(scale)
    mine, theirs = (
        coded(by, values, residual) for by in (kernels.to_blocks, twin_codecs.to_blocks)
    )
    for ours, twin in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(ours, twin)
    total = decoded(*mine[:2])
    expected = np.zeros_like(total)
    twin_codecs.add_blocks(*theirs[:2], expected)
    assert same(total, expected)


@settings(deadline=None, max_examples=50)
@given(st.lists(finite, min_size=1, max_size=20).map(values_of), st.sampled_from([1, 13, 300]))
def test_residual_is_the_unsent_part(some: Floats, times: int) -> None:
    values = np.repeat(some, times)
    scales, codes, unchanged, residual = coded(kernels.to_blocks, values, np.zeros_like(values))
    np.testing.assert_array_equal(unchanged, values)
    np.testing.assert_allclose(decoded(scales, codes) + residual, values, rtol=1e-6, atol=0)
    steps = np.repeat(scales, 256)[: len(values)]
    assert (np.abs(residual) <= np.maximum(0.5001 * steps, 1e-36)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "-inf"])
def test_non_finite_block_decodes_to_nan_and_keeps_its_residual(bad: float) -> None:
    values, before = numbers(0, 600), numbers(1, 600)
    values[300] = bad
    scales, codes, _, residual = coded(kernels.to_blocks, values, before)
    assert np.isnan(decoded(scales, codes)).tolist() == [256 <= n < 512 for n in range(600)]
    assert same(residual[256:512], before[256:512])
    assert not (residual[:256] == before[:256]).any()


def test_tiny_values_accumulate_until_they_are_sent() -> None:
    values = np.full(3, 4e-37, np.float32)
    residual, arrived = np.zeros_like(values), []
    for _ in range(3):
        scales, codes, _, residual = coded(kernels.to_blocks, values, residual)
        arrived.append(decoded(scales, codes)[0])
    assert arrived[:2] == [0, 0]
    assert arrived[2] == pytest.approx(1.2e-36, rel=0.01)


def test_the_largest_value_is_exact() -> None:
    scales, codes, *_ = coded(kernels.to_blocks, np.array([-127, 3, 0.6, -0.0], np.float32), None)
    assert scales.tolist() == [1]
    assert codes.tolist() == [-127, 3, 1, 0]
    assert kernels.block_count(0) == 0
    assert (kernels.block_count(1), kernels.block_count(256), kernels.block_count(257)) == (1, 1, 2)


# -- selection of the largest values, and the check for finite values -----------------------------


def places_of(values: NDArray[np.float32], count: int) -> NDArray[np.int32]:
    places = np.full(count, -1, np.int32)
    kernels.largest(values, places)
    return places


@settings(deadline=None, max_examples=100)
@given(some_values, st.data())
def test_largest_equals_the_twin(values: NDArray[np.float32], data: st.DataObject) -> None:
    values.flags.writeable = False
    count = data.draw(st.integers(0, len(values)))
    expected = np.zeros(count, np.int32)
    twin_codecs.largest(values, expected)
    assert same(places_of(values, count), expected)


@pytest.mark.parametrize("count", [1, 2, 999, 4999, 5000])
@pytest.mark.parametrize("digits", [0, 1, 7])
def test_largest_of_many_values_with_and_without_ties(count: int, digits: int) -> None:
    values = numbers(3, 5000).round(digits)
    expected = np.zeros(count, np.int32)
    twin_codecs.largest(values, expected)
    assert same(places_of(values, count), expected)


def test_values_that_differ_in_any_bit() -> None:
    # one bit per value, so that each of the three radix passes decides
    values = (np.int32(1) << np.arange(31, dtype=np.int32)).astype(np.int32).view(np.float32)
    for count in range(1, 32):
        assert places_of(values, count).tolist() == list(range(31 - count, 31))


def test_nan_exceeds_infinity_and_the_first_tie_wins() -> None:
    values = np.array([2, np.inf, -2, np.nan, -np.inf, 2], np.float32)
    assert places_of(values, 1).tolist() == [3]
    assert places_of(values, 2).tolist() == [1, 3]
    assert places_of(values, 4).tolist() == [0, 1, 3, 4]


@settings(deadline=None)
@given(some_values.filter(len), st.data())
def test_take_out_and_add_at_equal_the_twins(
    values: NDArray[np.float32], data: st.DataObject
) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, len(values) - 1), unique=True)), np.int32)
    places.flags.writeable = False
    mine, theirs = values.copy(), values.copy()
    taken, expected = np.zeros((2, len(places)), np.float32)
    kernels.take_out(mine, places, taken)
    twin_codecs.take_out(theirs, places, expected)
    assert same(mine, theirs)
    assert same(taken, expected)
    taken.flags.writeable = False
    with np.errstate(invalid="ignore"):
        twin_codecs.add_at(places, taken, theirs)
    kernels.add_at(places, taken, mine)
    np.testing.assert_array_equal(mine, theirs)
    assert (mine == values)[np.isfinite(values)].all()


def test_add_at_accepts_repeated_places() -> None:
    total = np.ones(3, np.float32)
    kernels.add_at(np.array([2, 2, 0], np.int32), np.array([1, 2, 3], np.float32), total)
    assert total.tolist() == [4, 1, 4]


@pytest.mark.parametrize("place", [-1, 3, 2**31 - 1])
def test_add_at_refuses_a_place_outside_and_does_not_write_it(place: int) -> None:
    room = np.zeros(5, np.float32)
    places, values = np.array([0, place], np.int32), np.array([1, 28], np.float32)
    with pytest.raises(DivergedError, match=f"place {place}, expected places from 0 to 2"):
        kernels.add_at(places, values, room[1:4])
    assert room.tolist() == [0, 1, 0, 0, 0]


LARGEST = float(np.finfo(np.float32).max)
values = st.lists(
    st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, LARGEST, -LARGEST, 1e-45])),
    max_size=40,
)


@settings(deadline=None)
@given(values)
def test_all_finite_agrees_with_numpy(found: list[float]) -> None:
    array = np.array(found, np.float32)
    assert kernels.all_finite(array) == bool(np.isfinite(array).all())
    wide = np.array([found, found], np.float64)
    assert kernels.all_finite(wide) == bool(np.isfinite(wide).all())


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_all_finite_finds_a_single_bad_value(bad: float) -> None:
    array = np.full((5, 7), LARGEST, np.float32)
    assert kernels.all_finite(array)
    array[4, 6] = bad
    assert not kernels.all_finite(array)
    assert not kernels.all_finite(array.T)
    assert kernels.all_finite(array[:4])
    array.flags.writeable = False
    assert not kernels.all_finite(array)
