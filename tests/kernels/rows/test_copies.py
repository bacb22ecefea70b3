# SPDX-License-Identifier: Apache-2.0
"""Local copies of the servers' rows, compared with the twin in NumPy."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.batches import numbers as random
from tests.kernels.batches import same

from fleetlight.kernels import twin_table
from fleetlight.kernels.arrays import Ids, Matrix
from fleetlight.kernels.rows import copies

DIM, STATE, COUNT = 3, 2, 8
positions = st.lists(
    st.integers(-1, COUNT - 1), max_size=20, unique_by=lambda n: n if n >= 0 else object()
)
windows = st.lists(st.sampled_from([-1, 0, 1, 2, 3]), min_size=COUNT, max_size=COUNT)


def made(last: list[int]) -> Matrix:
    rows = random(0, COUNT, DIM + STATE + DIM + 1)
    rows[:, -1] = last
    return rows


def ids(found: list[int]) -> Ids:
    return np.array(found, np.int64)


@settings(deadline=None)
@given(positions, windows, st.integers(1, 3))
def test_read_equals_the_twin(found: list[int], last: list[int], oldest: int) -> None:
    rows = made(last)
    out, expected = np.zeros((2, len(found), DIM), np.float32)
    stale = copies.read(rows, ids(found), oldest, out)
    assert same(stale, twin_table.read_copies(rows, ids(found), oldest, expected))
    assert same(out, expected)
    assert same(rows, made(last))


@settings(deadline=None)
@given(positions, windows)
def test_mark_equals_the_twin(found: list[int], last: list[int]) -> None:
    mine, theirs = made(last), made(last)
    known = ids([number for number in found if number >= 0])
    assert same(copies.mark(mine, known, 3), twin_table.mark_copies(theirs, known, 3))
    assert same(mine, theirs)
    assert not len(copies.mark(mine, known, 3))


@settings(deadline=None)
@given(positions, windows, st.integers(1, 3))
def test_visit_reads_and_marks(found: list[int], last: list[int], oldest: int) -> None:
    mine, theirs = made(last), made(last)
    out, expected = np.zeros((2, len(found), DIM), np.float32)
    stale, fresh = copies.visit(mine, ids(found), oldest, 3, out)
    assert same(stale, twin_table.read_copies(theirs, ids(found), oldest, expected))
    assert same(out, expected)
    assert same(fresh, twin_table.mark_copies(theirs, np.delete(ids(found), stale), 3))
    assert same(mine, theirs)


@settings(deadline=None)
@given(positions, windows)
def test_renew_equals_the_twin(found: list[int], last: list[int]) -> None:
    mine, theirs = made(last), made(last)
    arrived = random(1, len(found), DIM)
    copies.renew(mine, ids(found), arrived)
    twin_table.renew_copies(theirs, ids(found), arrived)
    assert same(mine, theirs)


@settings(deadline=None)
@given(positions, windows, st.integers(1, 3))
def test_share_equals_the_twin(found: list[int], last: list[int], among: int) -> None:
    mine, theirs = made(last), made(last)
    known = ids([number for number in found if number >= 0])
    sent = copies.share(mine, known, among, DIM)
    assert same(sent, twin_table.share_copies(theirs, known, among, DIM))
    assert same(mine, theirs)


def test_renew_keeps_unsent_local_progress() -> None:
    rows = np.zeros((1, DIM + DIM + 1), np.float32)
    row = ids([0])
    copies.renew(rows, row, np.full((1, DIM), 5, np.float32))
    copies.mark(rows, row, 1)
    rows[0, :DIM] += 2
    copies.renew(rows, row, np.full((1, DIM), 9, np.float32))
    assert rows[0].tolist() == [11, 11, 11, 9, 9, 9, 1]
    assert copies.share(rows, row, 2, DIM).tolist() == [[1, 1, 1]]
    assert rows[0].tolist() == [11, 11, 11, 10, 10, 10, 1]
