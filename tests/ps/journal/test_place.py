# SPDX-License-Identifier: Apache-2.0
"""A folder belongs to one process, and not to those that it has forked."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fleetlight.errors import JournalError
from fleetlight.ps.journal import place


def test_a_folder_is_had_by_one_at_a_time(tmp_path: Path) -> None:
    lock = place.claim(tmp_path / "deep" / "er")
    whose = rf"in use by another process \(process {os.getpid()} on .+\); give"
    with pytest.raises(JournalError, match=whose):
        place.claim(tmp_path / "deep" / "er")
    with pytest.raises(JournalError, match=whose):
        place.refuse_if_in_use(tmp_path / "deep" / "er")
    place.release(lock)
    place.release(place.claim(tmp_path / "deep" / "er"))


def test_a_folder_is_had_where_there_is_no_room_to_say_by_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    lock = place.claim(tmp_path)
    with pytest.raises(JournalError, match="in use by another process; give"):
        place.claim(tmp_path)
    place.release(lock)


def test_a_forked_child_does_not_keep_it(tmp_path: Path) -> None:
    lock = place.claim(tmp_path)
    (hears, told), (heard, tells) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        # lives until its parent says so, as loading processes do
        os.write(tells, b"x")
        os.read(hears, 1)
        os._exit(0)
    try:
        os.read(heard, 1)
        place.release(lock)
        place.release(place.claim(tmp_path))
    finally:
        os.write(told, b"x")
        assert os.waitpid(child, 0)[1] == 0
        for end in (hears, told, heard, tells):
            os.close(end)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"first", b"2"):
        place.replace(path, data)
        assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_that_is_written_in_parts_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:3]))
    place.replace(tmp_path / "file", b"ten bytes.")
    assert (tmp_path / "file").read_bytes() == b"ten bytes."


def test_a_disk_that_becomes_full_leaves_a_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.replace(tmp_path / "file", b"before")
    room = [3]
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, bytes(data)[: room.pop()])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        place.replace(tmp_path / "file", b"behind")
    assert (tmp_path / "file").read_bytes() == b"before"


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"cannot be used: .*; name another folder"):
        place.claim(tmp_path / "file")
