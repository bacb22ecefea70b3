# SPDX-License-Identifier: Apache-2.0
"""Tables of a job in its log folder."""

import time
from pathlib import Path

import msgspec
import pytest

from fleetlight.cli.fleetlight import main
from fleetlight.cli.terminal import output
from fleetlight.observe.telemetry.recorder import ThinnedFile
from fleetlight.observe.telemetry.snapshot import FOLDER, Snapshot, snapshot_file


def record(folder: Path, server: int, age_s: float, rows: float) -> None:
    values = {"table_rows{users}": rows, "table_bytes{users}": rows * 2**20}
    snapshot = Snapshot(time.time() - age_s, 1, values)
    ThinnedFile(folder / FOLDER / snapshot_file("server", server)).append(
        msgspec.json.encode(snapshot)
    )


def test_rows_bytes_growth_and_balance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, 0, 10.0, 0)
    record(tmp_path, 0, 0.0, 30)
    record(tmp_path, 1, 40.0, 10)
    assert main(["table", "stats", str(tmp_path)]) == 0
    first, zero, one = capsys.readouterr().out.splitlines()
    assert first.startswith("table users: 40 rows, 40.0 MiB in memory, +1")
    assert zero == "  server 0: 30 rows, 30.0 MiB, 1.500 of the average"
    assert one == "  server 1: 10 rows, 10.0 MiB, 0.500 of the average, 40 s ago"


def test_lines_are_broken_in_a_narrow_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, 0, 40.0, 1)
    assert main(["table", "stats", str(tmp_path)]) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr(output, "columns", lambda stream=None: 40)
    assert main(["table", "stats", str(tmp_path)]) == 0
    narrow = capsys.readouterr().out
    assert all(len(line) <= 40 for line in narrow.splitlines())
    assert narrow.split() == whole.split()
    assert len(narrow.splitlines()) > len(whole.splitlines()) == 2


def test_an_unknown_table_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path, 0, 0.0, 1)
    assert main(["table", "stats", str(tmp_path), "usres"]) != 0
    assert "users" in capsys.readouterr().err


def test_a_job_without_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FOLDER).mkdir()
    assert main(["table", "stats", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("no tables yet\n")
