# SPDX-License-Identifier: Apache-2.0
"""Marks of changed rows, compared with a set."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetlight.kernels import ChangedRows, PendingRows

#: beyond the words that the first marks have
ROWS = 3000
numbers = st.lists(st.integers(-1, ROWS - 1), max_size=20)
calls = st.lists(st.tuples(st.sampled_from(["mark", "clear", "take", "give_back"]), numbers))


@settings(deadline=None)
@given(calls)
def test_marks_are_a_set(calls: list[tuple[str, list[int]]]) -> None:
    changed, expected, taken = ChangedRows(), set[int](), (np.zeros(0, np.uint32), set[int]())
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
    pending = PendingRows(ROWS, changed.take())
    assert pending.left == len(expected)
    assert pending.take_between(0, ROWS).tolist() == sorted(expected)
    assert len(changed) == pending.left == 0
