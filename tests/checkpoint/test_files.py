# SPDX-License-Identifier: Apache-2.0
"""Files are complete or absent."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.states import described, full_disk_at

from fleetlight.checkpoint.storage import files
from fleetlight.checkpoint.storage.manifest import FileEntry
from fleetlight.errors import CorruptCheckpointError


def test_a_sink_returns_size_and_checksum(tmp_path: Path) -> None:
    data = os.urandom(3000)
    with files.Sink(tmp_path / "a") as sink:
        sink.write(data[:1000])
        sink.write(memoryview(data)[1000:])
        sink.write(b"")
        entry = sink.flush()
    assert (tmp_path / "a").read_bytes() == data
    assert entry == FileEntry("a", 3000, hashlib.sha256(data).hexdigest())
    assert described(tmp_path / "a") == entry
    files.verify(tmp_path / "a", entry)


def test_a_sink_never_writes_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(FileExistsError):
        files.Sink(tmp_path / "a")


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    with files.Sink(tmp_path / "a") as sink:
        sink.write(bytes(range(100)))
        entry = sink.flush()
    assert (tmp_path / "a").read_bytes() == bytes(range(100))
    assert entry.sha256 == hashlib.sha256(bytes(range(100))).hexdigest()


def test_verify_distinguishes_truncated_and_changed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345678")
    entry = described(path)
    path.write_bytes(b"1234")
    with pytest.raises(CorruptCheckpointError, match=r"a was truncated .* 4 bytes, expected 8"):
        files.verify(path, entry)
    path.write_bytes(b"1234567x")
    with pytest.raises(CorruptCheckpointError, match=f"a was changed .* expected {entry.sha256}"):
        files.verify(path, entry)


def test_replacing_shows_the_old_file_until_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with files.replacing(path) as sink:
        sink.write(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("call", range(1, 5))
def test_a_failed_replacement_keeps_the_old_file(
    tmp_path: Path, watched_os: Any, call: int
) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    watched_os(full_disk_at(call))
    with pytest.raises(OSError, match="No space"), files.replacing(path) as sink:
        sink.write(b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]
