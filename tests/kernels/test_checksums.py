# SPDX-License-Identifier: Apache-2.0
"""The checksum detects changed bytes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetlight.kernels import checksum, twin_table


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
