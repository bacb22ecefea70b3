# SPDX-License-Identifier: Apache-2.0
"""The fleetrun command: its refusals, and its import time."""

import pathlib
import socket
import subprocess
import sys

import pytest

import fleetlight
from fleetlight.cli.fleetrun import main


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("print('hello')")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["none.py"], 2, "script 'none.py' does not exist"),
        (["-m", "nope.mod"], 2, "module 'nope.mod' does not exist"),
        (["--nproc_per_nodes=2", "t.py"], 2, "did you mean '--nproc_per_node'"),
        (["--gpus", "0,1", "t.py"], 2, "this machine has no GPU; use --nproc_per_node 2"),
        (
            ["--ips", "203.0.113.1,203.0.113.2", "t.py"],
            2,
            "none of 203.0.113.1, 203.0.113.2 is an address",
        ),
        (
            ["--ssl", "dir", "--server_num", "1", "--worker_num", "1", "t.py"],
            2,
            "dir is not a folder",
        ),
        (["--log_dir", "t.py/log", "t.py"], 1, "cannot write logs"),
        (["--use_paddlecloud", "t.py"], 2, "PADDLE_TRAINERS"),
    ],
)
def test_invalid_commands_are_refused(
    words: list[str], code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    shown = capfd.readouterr()
    assert shown.err.startswith("fleetrun: error: ")
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1


def test_a_taken_port_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--start_port", str(port), "t.py"]) == 1
    assert f"port {port} on 127.0.0.1 is taken" in capfd.readouterr().err


def test_a_job_runs_from_this_process(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["-v", "--nnodes", "1", "t.py"]) == 0
    shown = capfd.readouterr().out
    assert "nnodes: 1:1" in shown
    assert "\nhello\n" in shown


CHEAP = """
import sys
from fleetlight.cli.fleetrun import main
try:
    main(["--help"])
except SystemExit:
    pass
loaded = {"torch", "numpy", "rich", "msgspec", "subprocess", "ctypes", "socket"} & set(sys.modules)
assert not loaded, loaded
"""


def test_help_is_cheap_and_complete() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHEAP], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for flag in ("--nproc_per_node", "--gpus", "--ips", "--server_num", "--max_restarts", "--tee"):
        assert flag in done.stdout
    assert "--xpus" not in done.stdout
    assert "on this machine; on several, list all with --servers and --workers" in done.stdout


def test_version_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capfd.readouterr().out == f"fleetrun {fleetlight.__version__}\n"


def test_one_machine_never_imports_torch() -> None:
    code = (
        "import sys; from fleetlight.cli.fleetrun import main; main(['t.py']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
