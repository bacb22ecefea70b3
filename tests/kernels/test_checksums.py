# SPDX-License-Identifier: Apache-2.0
"""Bytes that changed have another checksum."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetlight.kernels import checksum, twins


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 9))
def test_it_equals_the_twin(data: bytes, start: int) -> None:
    expected = twins.checksum(data[start:])
    assert checksum(data[start:]) == expected
    # wherever the bytes lie, and whether they may be written
    found = np.frombuffer(data, np.uint8)[start:]
    assert checksum(found) == expected
    assert checksum(found.copy()) == expected
    assert checksum(memoryview(data)[start:]) == expected


def test_it_is_part_of_the_format() -> None:
    assert [checksum(data) for data in (b"", b"a", bytes(range(200)))] == FORMAT


#: of nothing, of one byte, and of 25 words
FORMAT = [3765743779, 2573604982, 1063851543]


@settings(deadline=None)
@given(st.data())
def test_a_change_anywhere_is_found(data: st.DataObject) -> None:
    before = bytearray(data.draw(st.binary(min_size=1, max_size=200)))
    told = checksum(before)
    at = data.draw(st.integers(0, len(before) - 1))
    before[at] ^= data.draw(st.integers(1, 255))
    assert checksum(before) != told


def test_zeros_and_what_has_moved_are_told_apart() -> None:
    lengths = {checksum(bytes(n)) for n in range(200)}
    assert len(lengths) == 200
    word = b"8 bytes!"
    places = {checksum(bytes(8 * n) + word + bytes(8 * (40 - n))) for n in range(41)}
    assert len(places) == 41


def test_the_highest_bits_of_two_words_do_not_cancel() -> None:
    data = np.zeros(64, np.uint64)
    told = {checksum(data.tobytes())}
    for one in range(64):
        for other in range(one):
            data[[one, other]] = 1 << 63
            told.add(checksum(data.tobytes()))
            data[[one, other]] = 0
    assert len(told) == 1 + 64 * 63 // 2
