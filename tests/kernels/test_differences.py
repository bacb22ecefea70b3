# SPDX-License-Identifier: Apache-2.0
"""Differences of own steps, against the same arithmetic in NumPy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.strange_floats import one_value, values_of

from fleetlight.kernels import difference, rebase

four_arrays = st.lists(st.tuples(one_value, one_value, one_value, one_value), max_size=40).map(
    lambda rows: [values_of([row[n] for row in rows]) for n in range(4)]
)


@given(four_arrays, st.booleans())
def test_differences_and_their_new_start(
    drawn: list[NDArray[np.float32]], has_pending: bool
) -> None:
    local, since, now, pending = drawn
    if not has_pending:
        pending = pending[:0]
    out, later = np.empty_like(local), since.copy()
    difference(local, later, out)
    with np.errstate(all="ignore"):
        expected = local - since
        start = now + pending if has_pending else now
        moved = start + expected
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(later, local)

    now.flags.writeable = False
    later, stepped = since.copy(), local.copy()
    rebase(stepped, later, now, pending, out)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(later, start)
    np.testing.assert_array_equal(stepped, moved)
