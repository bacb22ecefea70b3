# SPDX-License-Identifier: Apache-2.0
"""Files are replaced completely or stay unchanged."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from fleetlight.files import atomic
from fleetlight.files.atomic import replace_file, replacing


@pytest.mark.parametrize("unique", [False, True])
def test_a_file_is_replaced_completely(tmp_path: Path, unique: bool) -> None:
    path = tmp_path / "file"
    for data in (b"first", b"2"):
        replace_file(path, data, unique=unique)
        assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["file"]


def test_readers_see_the_old_file_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with replacing(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:3]))
    replace_file(tmp_path / "file", b"ten bytes.")
    assert (tmp_path / "file").read_bytes() == b"ten bytes."


@pytest.mark.parametrize("unique", [False, True])
def test_a_full_disk_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unique: bool
) -> None:
    replace_file(tmp_path / "file", b"before")
    room = [3]
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, bytes(data)[: room.pop()])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "file", b"after", unique=unique)
    assert (tmp_path / "file").read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]


def test_the_file_of_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file.new").write_bytes(b"half of")
    (tmp_path / "file.new").chmod(0o666)
    replace_file(tmp_path / "file", b"whole", mode=0o600)
    assert (tmp_path / "file").read_bytes() == b"whole"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_writers_with_unique_names_do_not_conflict(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path, unique=True) as one, replacing(path, unique=True) as other:
        assert one != other
        one.write_bytes(b"1")
        other.write_bytes(b"2")
    assert path.read_bytes() == b"1"


@pytest.mark.durable
@pytest.mark.parametrize("durable", [False, True])
def test_durable_content_and_name_are_fsynced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    flushed: list[str] = []

    def note(fd: int) -> None:
        flushed.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")

    monkeypatch.setattr(os, "fsync", note)
    replace_file(tmp_path / "file", b"data", durable=durable)
    assert flushed == (["file", "folder"] if durable else [])


def test_only_an_unsupported_fsync_of_a_folder_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", refuse)
    error = errno.EINVAL
    atomic.sync_folder_if_supported(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        atomic.sync_folder(tmp_path)
    error = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        atomic.sync_folder_if_supported(tmp_path)
