# SPDX-License-Identifier: Apache-2.0
"""An engine: fleetrun shows or submits a job, and fleetlight asks for it."""

from pathlib import Path

import pytest

from fleetlight.cli import fleetlight as tool
from fleetlight.cli.fleetrun import main
from fleetlight.launch import backends

#: an engine that keeps its jobs in a folder
TOY = """
import json, pathlib

from fleetlight.launch.backends import MemberState, on_engine


class Folder:
    def emit(self, job):
        return json.dumps({"name": job.name, "counts": job.counts, "options": job.engine.options,
            "variables": job.engine.variables, "memory": job.server.resources.memory_mib,
            "cpus": job.worker.resources.cpus}) + "\\n"

    def submit(self, job):
        pathlib.Path("job").write_text(self.emit(job))
        return "7"

    def status(self, job_id):
        return [MemberState("worker 0", "RUNNING", "n1"), MemberState("server 0", job_id, "", "?")]

    def logs(self, job_id, member):
        yield f"{job_id} {member}\\n".encode()

    def stop(self, job_id):
        pathlib.Path("stopped").write_text(job_id)

    def scale(self, job_id, counts):
        return f"{job_id}-{counts}"


BACKEND = on_engine("toy_engine", Folder())
"""

COUNTS = ("--server_num", "1", "--worker_num", "2")
WORDS = ("--on", "toy_engine", *COUNTS, "--worker_cpus", "3", "--server_memory", "2G")


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "backends"
    folder.mkdir()
    (folder / "toy_engine.py").write_text(TOY)
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(folder)])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Train_it.py").write_text("")


def test_print_shows_what_would_be_submitted(capfd: pytest.CaptureFixture[str]) -> None:
    more = ("--option", "partition=gpu", "--env", "A=b=c", "--env", "D=")
    assert main([*WORDS, *more, "--print", "Train_it.py"]) == 0
    shown = capfd.readouterr().out
    assert '"name": "train-it"' in shown
    assert '"counts": {"FLEET_WORKER_NUM": "2", "FLEET_SERVER_NUM": "1"}' in shown
    assert '"options": {"partition": "gpu"}, "variables": {"A": "b=c", "D": ""}' in shown
    assert '"memory": 2048, "cpus": 3' in shown
    assert not Path("job").exists()


def test_commands_of_a_submitted_job(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "Train_it.py"]) == 0
    assert "submitted toy_engine:7; see fleetlight ps toy_engine:7" in capfd.readouterr().out
    assert Path("job").exists()
    assert tool.main(["ps", "toy_engine:7"]) == 0
    assert capfd.readouterr().out.splitlines() == [
        "process   state    machine",
        "worker 0  RUNNING  n1",
        "server 0  7                 ?",
    ]
    assert tool.main(["logs", "toy_engine:7", "worker", "1"]) == 0
    assert capfd.readouterr().out == "7 worker 1\n"
    assert tool.main(["scale", "toy_engine:7", "--worker_num", "4"]) == 0
    assert capfd.readouterr().out == "scaling: toy_engine:7-{'worker': 4}\n"
    assert tool.main(["stop", "toy_engine:7"]) == 0
    assert Path("stopped").read_text() == "7"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ps", "7"], "got the job '7', expected the log folder of a job, or BACKEND:ID with"),
        (["stop", "toy_engine:"], "one of the backends hosts, kubernetes, processes, ray, slurm,"),
        (["scale", "toy_engine:7"], "pass --worker_num N or --server_num N"),
        (
            ["scale", "toy_engine:7", "--server_num", "0"],
            "--server_num 0: a job needs at least 1 server",
        ),
    ],
)
def test_wrong_commands_are_refused(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(words) == 1
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--print", "Train_it.py"], "--print is for an engine that places the processes"),
        (["--name", "x", "Train_it.py"], "--name is for an engine that places the processes"),
        (["--env", "A=1", "Train_it.py"], "--env is for an engine that places the processes"),
        ([*WORDS, "--tee", "Train_it.py"], "--tee is for processes that fleetrun starts itself"),
        ([*WORDS, "--env", "FLEET_INDEX=1", "Train_it.py"], "the engine sets this variable"),
        ([*WORDS, "--option", "x", "Train_it.py"], "got 'x', expected NAME=VALUE"),
        ([*WORDS, "--worker_memory", "4", "Train_it.py"], "expected a size like 500M or 4G"),
    ],
)
def test_wrong_flags_are_refused(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capfd.readouterr().err
