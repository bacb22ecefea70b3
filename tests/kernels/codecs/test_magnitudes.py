# SPDX-License-Identifier: Apache-2.0
"""Selection of the largest values, and the check for finite values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.batches import numbers, same
from tests.kernels.strange_floats import some_values

from fleetlight.errors import DivergedError
from fleetlight.kernels import add_at, all_finite, largest, take_out
from fleetlight.kernels.codecs import twin_codecs


def places_of(values: NDArray[np.float32], count: int) -> NDArray[np.int32]:
    places = np.full(count, -1, np.int32)
    largest(values, places)
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
    take_out(mine, places, taken)
    twin_codecs.take_out(theirs, places, expected)
    assert same(mine, theirs)
    assert same(taken, expected)
    taken.flags.writeable = False
    with np.errstate(invalid="ignore"):
        twin_codecs.add_at(places, taken, theirs)
    add_at(places, taken, mine)
    np.testing.assert_array_equal(mine, theirs)
    assert (mine == values)[np.isfinite(values)].all()


def test_add_at_accepts_repeated_places() -> None:
    total = np.ones(3, np.float32)
    add_at(np.array([2, 2, 0], np.int32), np.array([1, 2, 3], np.float32), total)
    assert total.tolist() == [4, 1, 4]


@pytest.mark.parametrize("place", [-1, 3, 2**31 - 1])
def test_add_at_refuses_a_place_outside_and_does_not_write_it(place: int) -> None:
    room = np.zeros(5, np.float32)
    places, values = np.array([0, place], np.int32), np.array([1, 28], np.float32)
    with pytest.raises(DivergedError, match=f"place {place}, expected places from 0 to 2"):
        add_at(places, values, room[1:4])
    assert room.tolist() == [0, 1, 0, 0, 0]


MAX_FLOAT = float(np.finfo(np.float32).max)
values = st.lists(
    st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, MAX_FLOAT, -MAX_FLOAT, 1e-45])),
    max_size=40,
)


@settings(deadline=None)
@given(values)
def test_all_finite_agrees_with_numpy(found: list[float]) -> None:
    array = np.array(found, np.float32)
    assert all_finite(array) == bool(np.isfinite(array).all())
    wide = np.array([found, found], np.float64)
    assert all_finite(wide) == bool(np.isfinite(wide).all())


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_all_finite_finds_a_single_bad_value(bad: float) -> None:
    array = np.full((5, 7), MAX_FLOAT, np.float32)
    assert all_finite(array)
    array[4, 6] = bad
    assert not all_finite(array)
    assert not all_finite(array.T)
    assert all_finite(array[:4])
    array.flags.writeable = False
    assert not all_finite(array)
