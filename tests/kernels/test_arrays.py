# SPDX-License-Identifier: Apache-2.0
"""Arrays, checksums, columns and differences in kernels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.kernels.strange_floats import one_value, values_of

from fleetlight.errors import ConfigError
from fleetlight.kernels import checksum, difference, rebase, twin_table
from fleetlight.kernels.arrays import as_grid, as_ids, room
from fleetlight.kernels.columns import SideBySide, follow_each_other


def test_matching_arrays_are_not_copied() -> None:
    ids, values = np.arange(3), np.ones((2, 3), np.float32)
    assert np.shares_memory(as_ids(ids), ids)
    assert as_grid(values, 3, "rows") is values
    assert room(values, (2, 3)) is values


def test_other_arrays_are_converted() -> None:
    assert as_ids([[1, 2], [3, 4]]).tolist() == [1, 2, 3, 4]
    assert as_ids([]).dtype == np.int64
    assert as_ids(np.arange(6)[::2]).flags.c_contiguous
    assert as_ids(np.array([2**64 - 1], np.uint64)).tolist() == [-1]
    assert as_grid(np.ones((3, 2)).T, 3, "rows").flags.c_contiguous


def test_errors_name_the_wrong_shape() -> None:
    with pytest.raises(ConfigError, match=r"rows have the shape \[2\], expected \[any, 2\]"):
        as_grid(np.ones(2), 2, "rows")
    with pytest.raises(ConfigError, match=r"out is float64\[1, 2\], expected .*float32\[1, 2\]"):
        room(np.ones((1, 2)), (1, 2))  # type: ignore[arg-type]


# -- the checksum detects changed bytes -----------------------------------------------------------


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 9))
def test_checksum_equals_the_twin(data: bytes, start: int) -> None:
    expected = twin_table.checksum(data[start:])
    assert checksum(data[start:]) == expected
    # for any alignment, read-only or writable
    found = np.frombuffer(data, np.uint8)[start:]
    assert checksum(found) == expected
    assert checksum(found.copy()) == expected
    assert checksum(memoryview(data)[start:]) == expected


def test_checksums_are_part_of_the_format() -> None:
    assert [checksum(data) for data in (b"", b"a", bytes(range(200)))] == FORMAT


#: checksums of no bytes, of one byte and of 25 words
FORMAT = [3765743779, 2573604982, 1063851543]


@settings(deadline=None)
@given(st.data())
def test_any_changed_byte_changes_the_checksum(data: st.DataObject) -> None:
    before = bytearray(data.draw(st.binary(min_size=1, max_size=200)))
    original = checksum(before)
    at = data.draw(st.integers(0, len(before) - 1))
    before[at] ^= data.draw(st.integers(1, 255))
    assert checksum(before) != original


def test_lengths_of_zeros_and_moved_words_differ() -> None:
    assert len({checksum(bytes(n)) for n in range(200)}) == 200
    word = b"8 bytes!"
    assert len({checksum(bytes(8 * n) + word + bytes(8 * (40 - n))) for n in range(41)}) == 41


def test_the_highest_bits_of_two_words_do_not_cancel() -> None:
    data = np.zeros(64, np.uint64)
    checksums = {checksum(data.tobytes())}
    for one in range(64):
        for other in range(one):
            data[[one, other]] = 1 << 63
            checksums.add(checksum(data.tobytes()))
            data[[one, other]] = 0
    assert len(checksums) == 1 + 64 * 63 // 2


# -- `SideBySide` equals `np.stack` ---------------------------------------------------------------


@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize("shape", [(1, 0), (1, 5), (3, 1), (4, 9), (7, 1030), (26, 2500)])
def test_columns_become_rows(shape: tuple[int, int], floats: bool) -> None:
    columns = list(np.random.default_rng(0).integers(-(2**40), 2**40, shape))
    columns[0] = columns[0].astype(np.int32)
    # one that is not aligned
    whole = b"1" + columns[-1].tobytes()
    columns[-1] = np.ndarray(shape[1:], columns[-1].dtype, whole, offset=1)
    expected = np.stack(columns, 1).astype(np.float32 if floats else np.int64)
    found = SideBySide(columns, floats=floats)
    for start, stop in ((0, None), (0, shape[1]), (1, 40), (max(0, shape[1] - 1), shape[1] + 9)):
        matrix = found.rows(start, stop)
        assert matrix.dtype == expected.dtype
        np.testing.assert_array_equal(matrix, expected[start:stop])


@pytest.mark.parametrize("records", [[], [5], [3, 4, 5], [3, 4, 6], [4, 3], [2, 2]])
def test_records_follow_each_other(records: list[int]) -> None:
    given = np.array(records, np.int64)
    assert follow_each_other(given) == bool((np.diff(given) == 1).all())


# -- differences of own steps, against the same arithmetic in NumPy -------------------------------

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
