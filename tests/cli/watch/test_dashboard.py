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
from fleetlight.errors import ConfigError
from fleetlight.launch.job.options import ANY_PORT
from fleetlight.launch.processes.child import Reaper
from fleetlight.launch.processes.followers import dashboard


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


def test_a_port_that_is_taken_is_named(
    script: Path, taken: int, capfd: pytest.CaptureFixture[str]
) -> None:
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


def test_a_second_page_of_a_job_keeps_its_token(
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


def test_a_page_leaves_the_token_of_a_later_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
