# SPDX-License-Identifier: Apache-2.0
"""`fleetrun --dashboard` and `fleetlight dashboard`: flags, and errors in one line."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetlight.cli import fleetlight as tool
from fleetlight.cli import fleetrun
from fleetlight.cli.arguments import parse
from fleetlight.cli.fleetlight import main
from fleetlight.cli.watch import trace
from fleetlight.errors import ConfigError
from fleetlight.launch.job.options import ANY_PORT
from fleetlight.launch.processes.child import Reaper
from fleetlight.launch.processes.followers import dashboard
from fleetlight.observe.tracing.clocks import ClockLead
from fleetlight.observe.tracing.request import (
    TracePart,
    TraceRequest,
    TraceStage,
    request,
    requested,
    write_part,
)


@pytest.mark.parametrize(
    ("words", "port", "arguments"),
    [
        ("train.py", None, ()),
        ("--dashboard train.py", ANY_PORT, ()),
        ("--dashboard --dashboard_port 8080 train.py", 8080, ()),
        ("--dashboard_port=8080 train.py 5", 8080, ("5",)),
        ("--dashboard_port 8080 --dashboard train.py", 8080, ()),
        ("--dashboard --log_dir x train.py", ANY_PORT, ()),
        ("--dashboard train.py --dashboard 7", ANY_PORT, ("--dashboard", "7")),
        ("train.py --dashboard train.py", None, ("--dashboard", "train.py")),
    ],
)
def test_a_port_shows_the_page(words: str, port: int | None, arguments: tuple[str, ...]) -> None:
    found = parse(words.split())
    assert (found.page_port, found.script, found.arguments) == (port, "train.py", arguments)


@pytest.mark.parametrize("word", ["--dashboard_port=x", "--dashboard_port=70000"])
def test_no_port(word: str) -> None:
    with pytest.raises(ConfigError, match="expected a port of 1 to 65535"):
        parse([word, "train.py"])


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield sock.getsockname()[1]


def _without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec

    def found(name: str, *rest: Any) -> Any:
        return None if name == package else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", found)


def test_one_line_says_what_to_install(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _without(monkeypatch, "starlette")
    assert fleetrun.main(["--dashboard", "train.py"]) == fleetrun.WRONG_USE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "starlette" in said
    assert "pip install 'fleetlight[dashboard]'" in said
    assert tool.main(["dashboard", str(script)]) == 1
    assert "pip install 'fleetlight[dashboard]'" in capsys.readouterr().err


def test_a_taken_port_is_named(script: Path, taken: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert fleetrun.main(["--dashboard_port", str(taken), "train.py"]) == fleetrun.WRONG_USE
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert f"port {taken} of the page is in use; pass --dashboard_port" in said
    assert tool.main(["dashboard", str(script), "--port", str(taken)]) == 1
    assert f"port {taken} of the page is in use; pass --port" in capfd.readouterr().err


def test_an_engine_runs_no_page(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--on", "slurm", "--nproc_per_node", "1", "--dashboard", "train.py"]
    assert fleetrun.main(words) == fleetrun.WRONG_USE
    assert "--dashboard shows a job that fleetrun itself runs" in capsys.readouterr().err


def test_folders_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["dashboard", str(tmp_path / "none")]) == 1
    assert "expected the log folder of a job" in capsys.readouterr().err
    assert tool.main(["dashboard"]) == 1
    assert "pass LOGDIR" in capsys.readouterr().err


def test_grafana_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["dashboard", "--grafana"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Fleetlight"


@pytest.fixture
def page(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A page that runs, with the token in its folder; the parameter is what SIGHUP does."""
    before = signal.signal(signal.SIGHUP, request.param)
    try:
        page = subprocess.Popen(
            [sys.executable, "-m", "fleetlight", "dashboard", str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    with page:
        assert page.stdout is not None
        assert "page: http" in page.stdout.readline()
        yield page
        page.kill()


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("page", [signal.SIG_DFL], indirect=True)
def test_a_signal_ends_a_page_and_its_token(
    page: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    assert (tmp_path / dashboard.TOKEN_FILE).exists()
    page.send_signal(number)
    assert page.wait(30) == 0
    assert not (tmp_path / dashboard.TOKEN_FILE).exists()


@pytest.mark.multiprocess
@pytest.mark.parametrize("page", [signal.SIG_IGN], indirect=True)
def test_a_page_under_nohup_outlives_a_hangup(page: subprocess.Popen[str], tmp_path: Path) -> None:
    page.send_signal(signal.SIGHUP)
    status = Path(f"/proc/{page.pid}/status").read_text()
    [ignored] = [int(line.split()[1], 16) for line in status.splitlines() if "SigIgn" in line]
    assert ignored & 1 << (signal.SIGHUP - 1)
    page.send_signal(signal.SIGTERM)
    assert page.wait(30) == 0
    assert not (tmp_path / dashboard.TOKEN_FILE).exists()


def test_a_second_page_keeps_the_jobs_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[str] = []
    monkeypatch.setattr(
        "fleetlight.dashboard.server.serve", lambda _folder, _socket, token, _: tokens.append(token)
    )
    assert tool.main(["dashboard", str(tmp_path)]) == 0
    file = tmp_path / dashboard.TOKEN_FILE
    assert not file.exists()
    first = dashboard.make_token(tmp_path)
    assert tool.main(["dashboard", str(tmp_path)]) == 0
    assert (tokens[1], file.read_text()) == (first, first)
    assert tokens[0] != first


def test_a_page_leaves_a_later_jobs_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later: list[str] = []
    monkeypatch.setattr(
        "fleetlight.dashboard.server.serve",
        lambda *given: later.append(dashboard.make_token(tmp_path)),
    )
    assert tool.main(["dashboard", str(tmp_path)]) == 0
    assert dashboard.read_token(tmp_path) == later[0]


@pytest.mark.multiprocess
def test_the_page_of_a_job_leaves_the_token_of_a_later_one(tmp_path: Path) -> None:
    with Reaper() as reaper:
        page = dashboard.DashboardProcess(tmp_path, 0, os.environ, reaper)
        later = dashboard.make_token(tmp_path)
        page.close()
    assert dashboard.read_token(tmp_path) == later


# -- `fleetlight trace` that is given up leaves no request and no part


@pytest.fixture(autouse=True)
def running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    names = ["worker 0", "worker 1"], ["server 0"]
    monkeypatch.setattr(trace, "_running", lambda log_dir: names)


def traced(folder: Path, *options: str) -> int:
    return main(["trace", str(folder), "--output", str(folder / "trace.json"), *options])


def files(folder: Path) -> list[Path]:
    return list((folder / "metrics").iterdir())


def write(folder: Path, *names: str) -> None:
    """The parts of these processes."""
    wanted = requested(folder)
    assert wanted is not None
    for name in names:
        write_part(folder, wanted, TracePart(name, 1, []))


def test_deadline_withdraws_the_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = TraceRequest("ab", 3)
    request(tmp_path, old)
    write_part(tmp_path, old, TracePart("worker 0", 1, []))
    assert traced(tmp_path, "--deadline_s", "0") != 0
    assert "no trace of server 0 arrived in time" in capsys.readouterr().err
    assert files(tmp_path) == []


def test_ctrl_c_withdraws_the_request_and_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        write(tmp_path, "worker 1", "server 0")
        raise KeyboardInterrupt

    monkeypatch.setattr(trace.time, "sleep", interrupted)
    assert traced(tmp_path) != 0
    assert files(tmp_path) == []


def test_a_trace_that_ends_leaves_its_output_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[TraceStage] = []

    def arrived(seconds: float) -> None:
        last = requested(tmp_path)
        assert last is not None
        asked.append(last.stage)
        names = {
            TraceStage.SERVERS_BEGIN: ["server 0 begun"],
            TraceStage.WORKERS_BEGIN: ["worker 0", "worker 1"],
            TraceStage.OVER: ["server 0"],
        }
        write(tmp_path, *names[last.stage])

    monkeypatch.setattr(trace.time, "sleep", arrived)
    assert traced(tmp_path) == 0
    assert list(dict.fromkeys(asked)) == list(TraceStage)
    assert files(tmp_path) == []
    assert (tmp_path / "trace.json").exists()


def test_each_other_host_has_a_line_on_its_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clocks = {"server 0": ClockLead(-2500.0, 100.0)}
    parts = {
        "worker 0": TracePart("worker 0", 1, [], host="a", clocks=clocks),
        "worker 1": TracePart("worker 1", 1, [], host="c"),
        "server 0 begun": TracePart("server 0 begun", 1, []),
        "server 0": TracePart("server 0", 1, [], host="b"),
    }
    monkeypatch.setattr(trace, "take_part", lambda log_dir, wanted, name: parts[name])
    assert traced(tmp_path) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert ": 20 steps of 2 workers, and 1 server; open it" in first
    assert lines == [
        "worker 1: the times are those of another host's clock, uncorrected, since no server was "
        "asked from both that host and the host of worker 0",
        "server 0: the clock there is 2.50 ms behind that of worker 0 (within 0.10 ms), which the "
        "trace corrects",
    ]


def test_a_later_trace_keeps_its_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = TraceRequest("cd", 3)
    monkeypatch.setattr(trace.time, "sleep", lambda seconds: request(tmp_path, other))
    assert traced(tmp_path) != 0
    assert "another fleetlight trace" in capsys.readouterr().err
    assert requested(tmp_path) == other
