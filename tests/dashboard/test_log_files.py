# SPDX-License-Identifier: Apache-2.0
"""Logs of a job: only its own, and never more than a maximum."""

from pathlib import Path

import pytest

from fleetlight.dashboard import log_files
from fleetlight.dashboard.log_files import log_names, read_log


def _lines(folder: Path, name: str, find: str = "") -> list[str]:
    found = read_log(folder, name, find)
    assert found is not None
    lines: list[str] = found["lines"]
    return lines


def test_workers_come_first_by_number(tmp_path: Path) -> None:
    for name in ("serverlog.0", "workerlog.10", "workerlog.2", "endpoints.log", "workerlog.x"):
        (tmp_path / name).touch()
    assert log_names(tmp_path) == ["workerlog.2", "workerlog.10", "serverlog.0"]


def test_the_last_lines(tmp_path: Path) -> None:
    (tmp_path / "workerlog.0").write_text("".join(f"line {n}\n" for n in range(2000)) + "half")
    lines = _lines(tmp_path, "workerlog.0")
    assert (len(lines), lines[-2:]) == (500, ["line 1999", "half"])


def test_a_search_ignores_case_and_finds_old_lines(tmp_path: Path) -> None:
    text = "ValueError: first\n" + "nothing\n" * 300_000 + "valueerror: last\n"
    (tmp_path / "workerlog.0").write_text(text)
    assert _lines(tmp_path, "workerlog.0", "VALUEERROR") == [
        "ValueError: first",
        "valueerror: last",
    ]
    assert "ValueError: first" not in _lines(tmp_path, "workerlog.0")


@pytest.mark.parametrize("find", ["ÄRGER", "ärger", "STRASSE"])
def test_a_search_ignores_the_case_of_all_letters(tmp_path: Path, find: str) -> None:
    (tmp_path / "workerlog.0").write_text("Ärger in der Straße\nnothing\n", encoding="utf-8")
    assert _lines(tmp_path, "workerlog.0", find) == ["Ärger in der Straße"]


def test_only_the_end_of_a_large_log_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "_SEARCHED_BYTES", 1000)
    (tmp_path / "workerlog.0").write_text("old error\n" + "x" * 80 + "\n" * 990 + "new error\n")
    assert _lines(tmp_path, "workerlog.0", "error") == ["new error"]


def test_a_line_without_end_is_cut(tmp_path: Path) -> None:
    (tmp_path / "workerlog.0").write_bytes(b"a" * (3 << 20) + b"\nend\n")
    assert _lines(tmp_path, "workerlog.0", "end") == ["end"]
    assert max(map(len, _lines(tmp_path, "workerlog.0", "a"))) == 2000


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "workerlog.0").write_bytes(b"\xff\xfe loss\n")
    assert _lines(tmp_path, "workerlog.0") == ["\ufffd\ufffd loss"]


@pytest.mark.parametrize("name", ["../outside", "other.txt", "workerlog.0/..", "", "workerlog."])
def test_no_file_but_a_log(tmp_path: Path, name: str) -> None:
    (tmp_path / "other.txt").write_text("secret")
    assert read_log(tmp_path, name) is None


def test_a_link_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("secret")
    (tmp_path / "workerlog.0").symlink_to(tmp_path / "other.txt")
    assert read_log(tmp_path, "workerlog.0") is None
