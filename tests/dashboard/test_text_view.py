# SPDX-License-Identifier: Apache-2.0
"""`fleetlight top`: the essentials of a job as text, wide and narrow."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from fleetlight.cli.fleetlight import main
from fleetlight.dashboard.job_files import JobFiles
from fleetlight.dashboard.text_view import text_of
from fleetlight.dashboard.view.job_view import JobView
from fleetlight.observe.figures.history import History
from fleetlight.observe.figures.recorder import EventFile, ThinnedFile
from fleetlight.observe.figures.snapshot import FOLDER, Snapshot, snapshot_file


def record(folder: Path, kind: str, index: int, at: float, **values: float) -> None:
    file = ThinnedFile(folder / FOLDER / snapshot_file(kind, index))
    counts = {"staleness": {2: 4}} if kind == "server" else {}
    found = {key.replace("__", "{") + "}" * ("__" in key): v for key, v in values.items()}
    file.append(msgspec.json.encode(Snapshot(at, 5, found, counts)))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A worker, a server and an event."""
    now = time.time()
    for ago, steps in ((4.0, 0.0), (0.0, 40.0)):
        record(
            tmp_path,
            "worker",
            0,
            now - ago,
            steps=steps,
            samples=10 * steps,
            step_wait_seconds=0.03 * steps,
            step_forward_seconds=0.07 * steps,
            resident_bytes=2.0**28,
            logged__loss=0.25,
        )
        record(tmp_path, "server", 0, now - ago, table_rows__users=10 * steps, applied_pushes=steps)
    EventFile(tmp_path, "fleetrun.h.1", "fleetrun").add("restart", "restart 1, pid 9", "worker 0")
    return tmp_path


def shown(folder: Path, columns: int | None, *, colour: bool = False) -> str:
    history, view = History(folder), JobView()
    history.poll()
    view.update(history, JobFiles(folder).read(), time.time())
    return text_of(view.whole(), columns, colour, clock=lambda at: "12:00:00")


def test_what_matters_is_shown(job: Path) -> None:
    text = shown(job, 120)
    [worker] = [line for line in text.splitlines() if line.startswith("worker 0")]
    assert " ".join(worker.split()) == "worker 0 running 40 10.0 100.0 ms 30% forward 256 MiB"
    assert "100 samples/s" in text
    assert "staleness 2.0" in text
    assert "table users: 400 rows" in text
    assert "12:00:00 worker 0: restart 1, pid 9" in text
    assert "\x1b" not in text


def test_a_narrow_terminal_breaks_no_word(job: Path) -> None:
    assert max(map(len, shown(job, 40).splitlines())) <= 40


def test_a_terminal_gets_colours(job: Path) -> None:
    assert "\x1b[2m" in shown(job, 120, colour=True)


def test_a_pipe_gets_it_once(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(job)]) == 0
    assert "worker 0" in capsys.readouterr().out


def test_another_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path)]) != 0
    assert "expected the log folder of a job" in capsys.readouterr().err
