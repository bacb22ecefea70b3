# SPDX-License-Identifier: Apache-2.0
"""Where tables are looked for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fleetlight.data.readers.absent import find, refuse_absent
from fleetlight.errors import DataError


def test_names_and_folders_in_order(tmp_path: Path) -> None:
    assert find(tmp_path, ["a", "b"]) is None
    for name in ("b", "a.gz", "sub/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert find(tmp_path, ["a", "b"]) == tmp_path / "a.gz"
    assert find(tmp_path / "b", ["a"]) == tmp_path / "b"
    assert find(tmp_path, ["c"], [".", "sub"]) is None
    assert find(tmp_path, ["a"], ["sub", "."]) == tmp_path / "sub/a"


def test_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError, match=r"X: .*no such folder.* a or b, plain.*stand_in=True"):
        refuse_absent("X", tmp_path / "gone", ["a", "b"], allowed=False)
    with caplog.at_level(logging.WARNING, "fleetlight"):
        refuse_absent("X", tmp_path, ["a"], allowed=True)
    assert "GENERATED" in caplog.text
