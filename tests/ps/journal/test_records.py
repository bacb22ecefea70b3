# SPDX-License-Identifier: Apache-2.0
"""Records: written ones are read, and a torn end is distinguished from damage."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetlight.ps.changes import BarrierPassed
from fleetlight.ps.journal.records import MAGIC, Gap, LogRecord, RecordReader, framed
from fleetlight.ps.messages import EndPhase, Fill, Message, MetricsRequest
from fleetlight.ps.server.durability import durability
from fleetlight.ps.transport.protocol import HEADER_LIMIT, Array, MessageCodec

CODEC: MessageCodec[Message] = MessageCodec(Message)
FIRST = 7


def filled(count: int) -> tuple[Message, list[Array]]:
    ids = np.arange(count, dtype=np.int64)
    return Fill([0], dense=False), [ids, np.full((count, 3), 0.5, np.float32)]


def sample(count: int = 4, first: int = FIRST) -> tuple[bytes, list[int]]:
    """Records of several sizes, and the offsets where each begins and the last ends."""
    data, starts = b"", [0]
    for number in range(first, first + count):
        message, arrays = filled(number % 3)
        data += b"".join(framed(CODEC, message, arrays).sealed(number))
        starts.append(len(data))
    return data, starts


def read(data: bytes, first: int = FIRST) -> tuple[list[LogRecord[Message]], Gap | None]:
    reader = RecordReader(CODEC, np.frombuffer(data, np.uint8), first)
    return list(reader), reader.gap


def test_written_records_are_read() -> None:
    data, starts = sample()
    records, gap = read(data)
    assert gap is None
    assert [record.number for record in records] == [7, 8, 9, 10]
    assert [(record.start, record.stop) for record in records] == list(itertools.pairwise(starts))
    for record in records:
        message, arrays = filled(record.number % 3)
        assert record.message == message
        for got, expected in zip(record.arrays, arrays, strict=True):
            assert got.dtype == expected.dtype
            assert np.array_equal(got, expected)


def test_an_empty_file_has_no_record_and_no_gap() -> None:
    assert read(b"") == ([], None)


def test_a_truncated_file_is_torn_at_its_end() -> None:
    data, starts = sample()
    for end in range(len(data)):
        records, gap = read(data[:end])
        whole = sum(stop <= end for stop in starts[1:])
        assert len(records) == whole
        if end in starts:
            assert gap is None
        else:
            assert gap is not None
            assert (gap.at, gap.followed_by, gap.is_short) == (starts[whole], None, True)


@pytest.mark.parametrize("rest", [b"\0", bytes(4096), MAGIC, MAGIC * 9, b"junk" * 100])
def test_garbage_after_the_last_record_is_a_torn_end(rest: bytes) -> None:
    data, starts = sample()
    records, gap = read(data + rest)
    assert len(records) == 4
    assert gap is not None
    assert (gap.at, gap.followed_by) == (starts[-1], None)


@given(st.data())
def test_a_flipped_bit_is_detected_and_the_next_record_named(data: st.DataObject) -> None:
    whole, starts = sample()
    offset = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[offset] ^= 1 << data.draw(st.integers(0, 7))
    records, gap = read(bytes(changed))
    number = sum(stop <= offset for stop in starts[1:])
    assert len(records) == number
    assert gap is not None
    assert gap.at == starts[number]
    # a changed last record cannot be distinguished from a torn one
    assert gap.followed_by == (FIRST + number + 1 if number < 3 else None)


def test_a_missing_record_is_detected() -> None:
    data, starts = sample()
    records, gap = read(data[: starts[1]] + data[starts[2] :])
    assert [record.number for record in records] == [7]
    assert gap == Gap(starts[1], "record 9 lies where 8 should", 10)


def test_a_file_with_other_record_numbers_is_a_gap() -> None:
    data, _ = sample(first=3)
    records, gap = read(data)
    assert records == []
    assert gap is not None
    assert gap.why == "record 3 lies where 7 should"


def test_records_far_after_a_hole_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlight.ps.journal.records._SEARCH_BYTES", 8)
    data, starts = sample()
    for hole in range(1, 40):
        records, gap = read(data[: starts[2]] + bytes(hole) + data[starts[3] :])
        assert len(records) == 2
        assert gap is not None
        assert (gap.at, gap.followed_by) == (starts[2], 10)


def test_a_record_is_a_copy_of_its_arrays() -> None:
    """Applying gradients may overwrite their memory."""
    rows = np.ones(1000, np.float32)
    record = framed(CODEC, Fill([], dense=True), [rows])
    before = b"".join(record.sealed(FIRST))
    rows[:] = 5
    assert b"".join(record.sealed(FIRST)) == before
    assert record.nbytes == len(before)
    assert read(before)[1] is None


def test_small_records_have_little_overhead() -> None:
    assert framed(CODEC, EndPhase(3)).nbytes < 80
    assert framed(CODEC, MetricsRequest()).nbytes < 70


def test_a_logged_change_may_exceed_the_message_limit() -> None:
    """For example, of an epoch with many ranges."""
    change = BarrierPassed(1, "x" * (HEADER_LIMIT + 1), [])
    data = b"".join(framed(durability.CODEC, change).sealed(FIRST))
    [record] = RecordReader(durability.CODEC, np.frombuffer(data, np.uint8), FIRST)
    assert record.message == change
