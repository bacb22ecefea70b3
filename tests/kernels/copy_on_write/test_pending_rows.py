# SPDX-License-Identifier: Apache-2.0
"""Rows that a snapshot still has to read, compared with the twin in NumPy."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.kernels.batches import numbers as random
from tests.kernels.batches import same

from fleetlight import kernels

WIDTH, ROW_COUNT, UNREAD, ROOM = 3, 80, 70, 9
lists = st.lists(st.integers(-1, ROW_COUNT - 1), max_size=30)
requests = st.lists(lists, max_size=4)


@settings(deadline=None)
@example([[*range(ROOM), 0]], 0, 0)
@given(requests, st.integers(0, UNREAD), st.integers(0, UNREAD))
def test_each_row_is_taken_once_before_it_changes(
    requests: list[list[int]], a: int, b: int
) -> None:
    rows, pending, taken = random(0, ROW_COUNT, WIDTH), kernels.PendingRows(UNREAD), set[int]()
    for request in requests:
        numbers, start = np.array(request, np.int64), 0
        mine, theirs = (kernels.Batch.empty(ROOM, WIDTH) for _ in range(2))
        while start < len(numbers):
            args = rows, numbers, 7 * numbers, start
            end = kernels.twin_table.take_rows(taken, UNREAD, *args, theirs)
            assert pending.take(*args, mine) == end
            assert mine.used == theirs.used
            for ours, twin in ((mine.rows, theirs.rows), (mine.numbers, theirs.numbers)):
                assert same(ours[: mine.used], twin[: mine.used])
            assert same(mine.ids[: mine.used], 7 * mine.numbers[: mine.used])
            start = end
            if mine.is_full:
                mine.used = theirs.used = 0
        rows[numbers[numbers >= 0]] += 1
        assert pending.left == UNREAD - len(taken)
    start, stop = sorted((a, b))
    rest = [n for n in range(start, stop) if n not in taken]
    assert pending.take_between(start, stop).tolist() == rest
    assert pending.take_between(start, stop).tolist() == []
    assert pending.left == UNREAD - len(taken) - len(rest)


def test_copy_rows_copies_whole_rows() -> None:
    rows = random(0, ROW_COUNT, WIDTH)
    numbers = np.array([5, 79, 5, 0])
    out = np.empty((4, WIDTH), np.float32)
    kernels.copy_rows(rows, numbers, out)
    assert same(out, rows[numbers])


# -- marks of changed rows, compared with a set ---------------------------------------------------

#: beyond the words that the first marks have
ROWS = 3000
numbers = st.lists(st.integers(-1, ROWS - 1), max_size=20)
calls = st.lists(st.tuples(st.sampled_from(["mark", "clear", "take", "give_back"]), numbers))


@settings(deadline=None)
@given(calls)
def test_marks_are_a_set(calls: list[tuple[str, list[int]]]) -> None:
    changed, expected, taken = (
        kernels.ChangedRows(),
        set[int](),
        (np.zeros(0, np.uint32), set[int]()),
    )
    for call, some in calls:
        theirs = np.array(some, np.int64)
        if call == "mark":
            changed.mark(theirs, max(some, default=-1) + 1)
            expected |= {n for n in some if n >= 0}
        elif call == "clear":
            changed.clear(theirs)
            expected -= set(some)
        elif call == "take":
            taken, expected = (changed.take(), expected), set()
        else:
            changed.give_back(taken[0])
            expected |= taken[1]
        assert len(changed) == len(expected)
    pending = kernels.PendingRows(ROWS, changed.take())
    assert pending.left == len(expected)
    assert pending.take_between(0, ROWS).tolist() == sorted(expected)
    assert len(changed) == pending.left == 0


# -- copy-on-write of rows, compared with the twin in NumPy ---------------------------------------

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
        fresh = kernels.lay_aside(places[0], rows, mine, used, numbers)
        assert same(fresh, kernels.twin_table.lay_aside(places[1], rows, theirs, used, numbers))
        assert same(mine, theirs)
        assert same(places[0], places[1])
        used += len(fresh)
        rows[[n for n in batch if n >= 0]] += 1
    first = random(0, COUNT, DIM)
    for number, place in enumerate(places[0]):
        if place > 0:
            assert same(mine[place - 1], first[number])
    unread = np.flatnonzero(places[0] >= 0).astype(np.int32)
    was = kernels.read_as_they_were(places[0], rows, mine, unread, -1)
    assert same(was, kernels.twin_table.read_as_they_were(places[1], rows, theirs, unread, -1))
    assert same(was, first[unread])
    assert same(places[0], places[1])
