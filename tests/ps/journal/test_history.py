# SPDX-License-Identifier: Apache-2.0
"""What is read back is all that was written, or an error; only the very end may be torn."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from pathlib import Path

import pytest

from fleetlight.errors import JournalError
from fleetlight.ps.journal import fsync_marker as synced_module
from fleetlight.ps.journal import history as history_module
from fleetlight.ps.journal.history import history
from fleetlight.ps.journal.records import framed
from fleetlight.ps.journal.segment import Segment, segments
from fleetlight.ps.messages import EndPhase, Message
from fleetlight.ps.transport.protocol import MessageCodec

CODEC: MessageCodec[Message] = MessageCodec(Message)


def write(folder: Path, *files: range, synced: int = 0) -> list[Path]:
    """A file for each range of numbers; all up to `synced` is on the disk for sure."""
    for numbers in files:
        segment = Segment(folder, numbers.start)
        for number in numbers:
            segment.write(framed(CODEC, EndPhase(number)).sealed(number))
            if number == synced:
                segment.sync()
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


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is started again between writing and reading."""
    starts = itertools.count(1)
    monkeypatch.setattr(synced_module, "_boot", lambda: next(starts))


def test_a_record_that_was_written_whole_is_not_cut_off(tmp_path: Path) -> None:
    [path] = write(tmp_path, range(1, 4))
    flip(path, -1)
    with pytest.raises(JournalError, match=r"record 3 does not fit .* machine has not stopped"):
        read(tmp_path)


@pytest.mark.usefixtures("stopped")
@pytest.mark.parametrize("at", [-1, 70])
def test_what_was_not_on_the_disk_when_the_machine_stopped_is_the_end(
    tmp_path: Path, at: int
) -> None:
    [path] = write(tmp_path, range(1, 5), synced=1)
    flip(path, at)
    numbers, (said,) = read(tmp_path)
    assert numbers == ([1, 2, 3] if at < 0 else [1])
    assert "they were probably not on the disk when the machine stopped" in said
    assert said.endswith("with them goes record 3") == (at > 0)
    assert read(tmp_path) == (numbers, [])


@pytest.mark.usefixtures("stopped")
def test_what_was_on_the_disk_is_damaged_where_it_cannot_be_read(tmp_path: Path) -> None:
    *_, path = write(tmp_path, range(1, 3), range(3, 6), synced=5)
    whole = path.read_bytes()
    flip(path, -1)
    with pytest.raises(JournalError, match=rf"damaged at byte .* {len(whole)} bytes of it were on"):
        read(tmp_path)
    # a record less, or all of them
    for size in (2 * len(whole) // 3, 0):
        path.write_bytes(whole[:size])
        with pytest.raises(JournalError, match=rf"ends at byte {size}, and {len(whole)} bytes of"):
            read(tmp_path)
    path.unlink()
    with pytest.raises(JournalError, match=rf"{path} is damaged: it ends at byte 0"):
        read(tmp_path)
    path.write_bytes(whole)
    assert read(tmp_path) == ([1, 2, 3, 4, 5], [])


@pytest.mark.parametrize("harm", ["gone", "torn", "changed", "long"])
def test_a_word_of_what_is_on_the_disk_that_makes_no_sense_says_nothing(
    tmp_path: Path, harm: str
) -> None:
    [path] = write(tmp_path, range(1, 4), synced=3)
    word = tmp_path / "synced"
    data = word.read_bytes()
    if harm == "gone":
        word.unlink()
    else:
        changed = bytes([data[0] ^ 1]) + data[1:]
        word.write_bytes({"torn": data[:-1], "changed": changed, "long": data + b"x"}[harm])
    flip(path, -1)
    assert read(tmp_path)[0] == [1, 2]


def test_what_is_taken_up_is_on_the_disk_before_more_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fdatasync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    *_, last = write(tmp_path, range(1, 4), range(4, 6))
    assert read(tmp_path)[0] == [1, 2, 3, 4, 5]
    assert synced == [str(last)]


def test_an_empty_file_that_was_given_up_is_none(tmp_path: Path) -> None:
    """It could not be begun, and others followed in the one before."""
    write(tmp_path, range(1, 3), range(3, 3))
    (tmp_path / f"{2:020d}.journal").touch()
    (tmp_path / f"{9:020d}.journal").touch()
    assert read(tmp_path) == ([1, 2], [])


def test_a_torn_end_of_an_earlier_file_is_damage(tmp_path: Path) -> None:
    first, _ = write(tmp_path, range(1, 4), range(4, 6))
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(JournalError, match=r"damaged at byte .* behind it lies another file"):
        read(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    paths = write(tmp_path, range(1, 4), range(4, 6), range(6, 7))
    paths[1].unlink()
    with pytest.raises(JournalError, match="records 4 to 5 are missing"):
        read(tmp_path)


def test_a_disk_that_does_not_give_back_what_it_has_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    [path] = write(tmp_path, range(1, 4))
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(JournalError, match=rf"{path} cannot be read at byte 0: Input/output"):
        read(tmp_path)


def test_what_was_read_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [path] = write(tmp_path, range(1, 400))
    monkeypatch.setattr(history_module, "_LET_GO_BYTES", 1000)
    monkeypatch.setattr(history_module, "_AHEAD_BYTES", 500)
    advised: list[tuple[int, int]] = []

    def advise(_: int, offset: int, size: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            advised.append((offset, size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    assert read(tmp_path)[0] == list(range(1, 400))
    end = 0
    for offset, size in advised:
        assert offset == end
        assert size >= 1000
        end += size
    assert path.stat().st_size - 2000 < end <= path.stat().st_size


def test_who_reads_no_further_leaves_nothing_open(tmp_path: Path) -> None:
    write(tmp_path, range(1, 400))
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    records = history(tmp_path, CODEC, 1, print)
    assert next(records).number == 1
    records.close()  # type: ignore[attr-defined]
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before
