# SPDX-License-Identifier: Apache-2.0
"""What is read back is all that was written, or an error; only the very end may be torn."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetlight.errors import JournalError
from fleetlight.ps.journal.history import history
from fleetlight.ps.journal.records import framed
from fleetlight.ps.journal.segment import Segment, segments
from fleetlight.ps.messages import EndPhase, Message
from fleetlight.ps.transport.protocol import Codec

CODEC: Codec[Message] = Codec(Message)


def write(folder: Path, *files: range) -> list[Path]:
    """A file for each range of numbers."""
    for numbers in files:
        segment = Segment(folder, numbers.start)
        for number in numbers:
            segment.write(framed(CODEC, EndPhase(number)).sealed(number))
        segment.close()
    return [path for _, path in segments(folder)]


def read(folder: Path, first: int = 1) -> tuple[list[int], list[str]]:
    said: list[str] = []
    return [record.number for record in history(folder, CODEC, first, said.append)], said


def test_files_are_read_one_after_another(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4), range(4, 5), range(5, 9))
    assert read(tmp_path) == (list(range(1, 9)), [])
    assert read(tmp_path, first=5) == (list(range(5, 9)), [])


def test_nothing_is_a_beginning(tmp_path: Path) -> None:
    assert read(tmp_path) == ([], [])


def test_an_empty_file_is_one_whose_writer_died(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4), range(4, 4))
    assert read(tmp_path) == ([1, 2, 3], [])


def test_a_torn_end_is_cut_off_and_told(tmp_path: Path) -> None:
    *_, last = write(tmp_path, range(1, 4), range(4, 6))
    whole = last.read_bytes()
    last.write_bytes(whole[:-1])
    numbers, (said,) = read(tmp_path)
    assert numbers == [1, 2, 3, 4]
    assert "are no whole record" in said
    assert "so they are cut off" in said
    # and then it is whole
    assert read(tmp_path) == ([1, 2, 3, 4], [])


def test_a_torn_end_of_an_earlier_file_is_damage(tmp_path: Path) -> None:
    first, _ = write(tmp_path, range(1, 4), range(4, 6))
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(JournalError, match=r"damaged at byte .* behind it lies others"):
        read(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    paths = write(tmp_path, range(1, 4), range(4, 6), range(6, 7))
    paths[1].unlink()
    with pytest.raises(JournalError, match="records 4 to 5 are missing"):
        read(tmp_path)
