# SPDX-License-Identifier: Apache-2.0
"""Copy-on-write of rows, compared with the twin in NumPy."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.batches import numbers as random
from tests.kernels.batches import same

from fleetlight.kernels import lay_aside, read_as_they_were, twin_table

DIM, COUNT, KNOWN = 3, 8, 6
batches = st.lists(st.lists(st.integers(-1, COUNT - 1), max_size=12), max_size=4)


@settings(deadline=None)
@given(batches, st.lists(st.integers(0, KNOWN - 1), max_size=3))
def test_each_row_is_copied_once_before_it_changes(
    changes: list[list[int]], read: list[int]
) -> None:
    rows = random(0, COUNT, DIM)
    # rows inserted later have no place, and some are already read
    places = np.zeros((2, KNOWN), np.int32)
    places[:, read] = -1
    mine, theirs = np.zeros((2, COUNT, DIM), np.float32)
    used = 0
    for batch in changes:
        numbers = np.array(batch, np.int64)
        fresh = lay_aside(places[0], rows, mine, used, numbers)
        assert same(fresh, twin_table.lay_aside(places[1], rows, theirs, used, numbers))
        assert same(mine, theirs)
        assert same(places[0], places[1])
        used += len(fresh)
        rows[[n for n in batch if n >= 0]] += 1
    first = random(0, COUNT, DIM)
    for number, place in enumerate(places[0]):
        if place > 0:
            assert same(mine[place - 1], first[number])
    unread = np.flatnonzero(places[0] >= 0).astype(np.int32)
    was = read_as_they_were(places[0], rows, mine, unread, -1)
    assert same(was, twin_table.read_as_they_were(places[1], rows, theirs, unread, -1))
    assert same(was, first[unread])
    assert same(places[0], places[1])
