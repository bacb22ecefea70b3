# SPDX-License-Identifier: Apache-2.0
"""Rows that a snapshot still has to read, compared with the twin in NumPy."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.kernels.batches import numbers as random
from tests.kernels.batches import same

from fleetlight.kernels import Batch, PendingRows, copy_rows, twin_table

DIM, COUNT, KNOWN, ROOM = 3, 80, 70, 9
lists = st.lists(st.integers(-1, COUNT - 1), max_size=30)
requests = st.lists(lists, max_size=4)


@settings(deadline=None)
@example([[*range(ROOM), 0]], 0, 0)
@given(requests, st.integers(0, KNOWN), st.integers(0, KNOWN))
def test_each_row_is_taken_once_before_it_changes(
    requests: list[list[int]], a: int, b: int
) -> None:
    rows, pending, taken = random(0, COUNT, DIM), PendingRows(KNOWN), set[int]()
    for request in requests:
        numbers, start = np.array(request, np.int64), 0
        mine, theirs = (Batch.empty(ROOM, DIM) for _ in range(2))
        while start < len(numbers):
            args = rows, numbers, 7 * numbers, start
            end = twin_table.take_rows(taken, KNOWN, *args, theirs)
            assert pending.take(*args, mine) == end
            assert mine.used == theirs.used
            for ours, twin in ((mine.rows, theirs.rows), (mine.numbers, theirs.numbers)):
                assert same(ours[: mine.used], twin[: mine.used])
            assert same(mine.ids[: mine.used], 7 * mine.numbers[: mine.used])
            start = end
            if mine.is_full:
                mine.used = theirs.used = 0
        rows[numbers[numbers >= 0]] += 1
        assert pending.left == KNOWN - len(taken)
    start, stop = sorted((a, b))
    rest = [n for n in range(start, stop) if n not in taken]
    assert pending.take_between(start, stop).tolist() == rest
    assert pending.take_between(start, stop).tolist() == []
    assert pending.left == KNOWN - len(taken) - len(rest)


def test_copy_rows_copies_whole_rows() -> None:
    rows = random(0, COUNT, DIM)
    numbers = np.array([5, 79, 5, 0])
    out = np.empty((4, DIM), np.float32)
    copy_rows(rows, numbers, out)
    assert same(out, rows[numbers])
