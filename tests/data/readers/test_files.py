# SPDX-License-Identifier: Apache-2.0
"""Finding and reading files."""

import gzip
import logging
from pathlib import Path

import pytest

from fleetlight.data.readers.files import contents, find, first_file, refuse_absent
from fleetlight.errors import DataError


def test_the_first_folder_wins_then_the_first_name(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one / "b", two / "a", two / "b"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert first_file([one, two], ["a", "b"]) == one / "b"
    assert first_file([two], ["a", "b"]) == two / "a"
    assert first_file([one, two], ["c"]) is None


@pytest.mark.parametrize("name", ["x", "x.gz"])
def test_gzip_is_known_by_its_bytes_not_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"inside"))
    assert contents(path) == b"inside"
    path.write_bytes(b"inside")
    assert contents(path) == b"inside"


def test_a_broken_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    packed = gzip.compress(bytes(range(256)) * 10)
    path.write_bytes(packed[:-20])
    with pytest.raises(DataError, match=r"x\.gz: cannot be read .*end-of-stream"):
        contents(path)
    damaged = bytearray(packed)
    damaged[-5] ^= 0xFF
    path.write_bytes(damaged)
    with pytest.raises(DataError, match="CRC"):
        contents(path)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone: cannot be read"):
        contents(tmp_path / "gone")


def test_find_tries_names_and_folders_in_order(tmp_path: Path) -> None:
    assert find(tmp_path, ["a", "b"]) is None
    for name in ("b", "a.gz", "sub/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find(tmp_path, ["a", "b"]) == tmp_path / "a.gz"
    assert find(tmp_path / "b", ["a"]) == tmp_path / "b"
    assert find(tmp_path, ["c"], [".", "sub"]) is None
    assert find(tmp_path, ["a"], ["sub", "."]) == tmp_path / "sub/a"


def test_absent_files_are_refused_or_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DataError, match=r"X: .*no such folder.* a or b, plain.*stand_in=True"):
        refuse_absent("X", tmp_path / "gone", "a or b, plain or .gz", allowed=False)
    with caplog.at_level(logging.WARNING, "fleetlight"):
        refuse_absent("X", tmp_path, "a", allowed=True)
    assert "GENERATED" in caplog.text
