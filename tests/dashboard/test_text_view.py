# SPDX-License-Identifier: Apache-2.0
"""`fleetlight top`: the essentials of a job as text, wide and narrow."""

import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fleetlight.cli.fleetlight import main
from fleetlight.dashboard.job_files import JobFiles
from fleetlight.dashboard.text_view import text_of
from fleetlight.dashboard.view.job_view import JobView
from fleetlight.observe.telemetry.history import History
from fleetlight.observe.telemetry.recorder import EventFile, ThinnedFile
from fleetlight.observe.telemetry.snapshot import FOLDER, Snapshot, line_of, snapshot_file


def record(folder: Path, kind: str, index: int, at: float, **values: float) -> None:
    file = ThinnedFile(folder / FOLDER / snapshot_file(kind, index))
    counts = {"staleness": {2: 4}} if kind == "server" else {}
    found = {key.replace("__", "{") + "}" * ("__" in key): v for key, v in values.items()}
    file.append(line_of(Snapshot(at, 5, found, counts)))


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


def test_a_value_that_is_no_number_is_named(job: Path) -> None:
    assert "loss 0.25" in shown(job, 120)
    record(job, "worker", 1, time.time(), logged__loss=math.nan, logged__auc=0.5)
    assert "loss NaN or infinite" in shown(job, 120)


def test_a_narrow_terminal_breaks_no_word(job: Path) -> None:
    assert max(map(len, shown(job, 40).splitlines())) <= 40


def test_a_terminal_gets_colours(job: Path) -> None:
    assert "\x1b[2m" in shown(job, 120, colour=True)


def process(name: str, **more: Any) -> dict[str, Any]:
    kind = name.split()[0]
    return {"name": name, "kind": kind, "state": "running", "restarts": 0, "step": 9} | more


def many(workers: int, tables: int = 1) -> dict[str, Any]:
    """What the page shows of a job with a slow worker, 3, and a failed one, 5."""
    processes = [process("server 0")]
    processes += [process(f"worker {n}", step_s=0.1 + 0.001 * n) for n in range(workers)]
    processes[4]["step_s"] = 2.0
    processes[6]["state"] = "failed"
    table = {"rows": 10, "growth": 0, "servers": {"server 0": 2**20}}
    return {
        "folder": "log",
        "description": {"mode": "async"},
        "over": False,
        "code": None,
        "processes": processes,
        "staleness": {"mean": None},
        "hit": None,
        "skipped": 0,
        "lines": {"logged": {}},
        "parts": ["wait"],
        "straggler": {"name": "worker 3", "part": "data"},
        "tables": [{"name": f"t{n}", **table} for n in range(tables)],
        "events": [{"at": 0.0, "who": "fleetrun", "text": f"event {n}"} for n in range(9)],
    }


def lines_of(whole: dict[str, Any], columns: int, lines: int) -> list[str]:
    return text_of(whole, columns, False, lambda at: "12:00:00", lines=lines).split("\n")


def test_few_lines_leave_out_fast_workers() -> None:
    found = lines_of(many(64), 120, 24)
    assert len(found) == 24
    assert found[0] == "log: async"
    shown = [line[:9].strip() for line in found if re.match(r"(worker|server) \d", line)]
    assert shown == ["server 0", "worker 3", "worker 5", *[f"worker {n}" for n in range(57, 64)]]
    assert "and 55 more" in found
    assert "slowest: worker 3, mostly in data" in found
    assert found[-1] == "12:00:00 fleetrun: event 8"


def test_fewer_lines_leave_out_old_events() -> None:
    found = lines_of(many(64, tables=9), 120, 18)
    assert len(found) <= 18
    events = [line for line in found if "event" in line]
    assert events == [f"12:00:00 fleetrun: event {n}" for n in (6, 7, 8)]
    assert "and 6 more" in found


@pytest.mark.parametrize("lines", [1, 3, 6, 10, 24, 200])
@pytest.mark.parametrize("columns", [20, 40, 80, 120])
def test_no_more_lines_than_the_terminal_has(columns: int, lines: int) -> None:
    whole = many(64)
    whole["folder"] = "a long name of a folder" if lines > 3 else "log"
    whole["events"][-1]["text"] = "word " * 60
    found = lines_of(whole, columns, lines)
    assert sum(max(1, -(-len(line) // columns)) for line in found) <= lines


def test_enough_lines_show_everything() -> None:
    whole = many(64)
    shown = "\n".join(lines_of(whole, 120, 200))
    assert shown == text_of(whole, 120, False, lambda at: "12:00:00")
    assert "more" not in shown


def test_ctrl_c_restores_the_terminal_and_leaves_the_last_state(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    for name, value in {"COLUMNS": "120", "LINES": "7", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("fleetlight.cli.watch.top.time.sleep", interrupted)
    assert main(["top", str(job)]) == 0
    before, alternate, rest = capsys.readouterr().out.partition("\x1b[?1049h")
    screen, normal, after = rest.partition("\x1b[?1049l")
    assert (before, bool(alternate), bool(normal)) == ("", True, True)
    assert screen.count("\n") < 7
    assert "server 0" in screen
    assert "restart 1, pid 9" in after
    assert "\x1b" not in after


def test_a_pipe_gets_it_once(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(job)]) == 0
    assert "worker 0" in capsys.readouterr().out


def test_another_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path)]) != 0
    assert "expected the log folder of a job" in capsys.readouterr().err
