# SPDX-License-Identifier: Apache-2.0
"""`WindowOrder`: every record once, near each other on disk, and equal for an equal seed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.data.order.window_order import WindowOrder

groups = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(groups, st.none() | st.integers(0, 2**40), st.integers(1, 30))
def test_order_has_every_record_once(rows: list[int], seed: int | None, window: int) -> None:
    order = WindowOrder(rows, seed=seed, rows=window)
    assert len(order) == sum(rows)
    assert sorted(order) == list(range(sum(rows)))
    assert order == WindowOrder(rows, seed=seed, rows=window)
    if seed is None:
        assert list(order) == list(range(sum(rows)))


@given(groups, st.integers(0, 2**40), st.integers(1, 30), st.data())
def test_slices_are_parts_of_the_order(
    rows: list[int], seed: int, window: int, data: st.DataObject
) -> None:
    order = WindowOrder(rows, seed=seed, rows=window)
    whole = [order[place] for place in range(len(order))]
    start, stop = data.draw(st.tuples(*[st.integers(0, len(order))] * 2))
    assert order[start:stop] == whole[start:stop]
    assert order[::2] == whole[::2]


@given(groups, st.integers(0, 2**40), st.integers(1, 30))
def test_window_is_the_records_of_some_groups(rows: list[int], seed: int, window: int) -> None:
    order = WindowOrder(rows, seed=seed, rows=window)
    firsts = [sum(rows[:group]) for group in range(len(rows))]
    for one in order.windows:
        own = [n for group in one.groups for n in range(firsts[group], firsts[group] + rows[group])]
        assert sorted(order[one.start : one.stop]) == sorted(own)
    # only the last one is short, and none is longer than its last group makes it
    for one in order.windows[:-1]:
        assert one.stop - one.start >= window > one.stop - one.start - rows[one.groups[-1]]


def test_seed_decides_the_order_of_groups_and_of_records() -> None:
    first, second = (list(WindowOrder([50] * 8, seed=seed, rows=50)) for seed in (1, 2))
    assert first != second
    assert [n // 50 for n in first] != [n // 50 for n in second]


def test_position_outside_is_an_error() -> None:
    order = WindowOrder([3], seed=None, rows=1)
    assert order[-1] == 2
    with pytest.raises(IndexError, match="position 3, expected one of 3"):
        order[3]
