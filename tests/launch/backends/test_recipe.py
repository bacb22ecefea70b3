# SPDX-License-Identifier: Apache-2.0
"""A new backend: one file, which `fleetrun --on` finds."""

from pathlib import Path

import pytest

from fleetlight.cli.arguments import known_flags
from fleetlight.cli.fleetrun import main
from fleetlight.errors import ConfigError
from fleetlight.launch import backends

#: an engine that runs one process after another, each with a minimal environment
TOY = """
import os, subprocess, sys

from fleetlight.launch.backends import Backend
from fleetlight.launch.job.environment import secret


def run(job, screen):
    codes = []
    for role in job.roles:
        screen.say(f"{role.count} {role.kind.value}, {role.resources.cpus} cpus")
        for index in range(role.count):
            who = {"FLEET_ROLE": role.kind.value, "FLEET_INDEX": str(index)}
            environment = {**os.environ, **job.environment, **secret(job), **who}
            command = [sys.executable, *job.command]
            codes.append(subprocess.run(command, env=environment).returncode)
    return max(codes)


BACKEND = Backend(run=run, chooses_machines=True)
"""

SCRIPT = """
import os, pathlib, sys
role, index = os.environ["FLEET_ROLE"], os.environ["FLEET_INDEX"]
output = " ".join([os.environ["FLEET_CHECKPOINT"], os.environ["FLEET_TOKEN"], *sys.argv[1:]])
pathlib.Path(f"{role}.{index}").write_text(output)
sys.exit(3 if (role, index) == ("worker", "1") else 0)
"""
TOKEN = "3f9ac27e51d0b8463f9ac27e51d0b846"


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "backends"
    folder.mkdir()
    (folder / "toy.py").write_text(TOY)
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(folder)])
    monkeypatch.setenv("FLEET_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)


def test_job_runs_on_a_toy_backend(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    counts = ("--server_num", "1", "--worker_num", "2")
    assert main(["--on", "toy", *counts, "--checkpoint", "ckpt", "train.py", "--lr", "3"]) == 3
    expected = f"{tmp_path / 'ckpt'} {TOKEN} --lr 3"
    for name in ("server.0", "worker.0", "worker.1"):
        assert (tmp_path / name).read_text() == expected
    assert "fleetrun: 1 server, 1 cpus\nfleetrun: 2 worker, 1 cpus\n" in capfd.readouterr().out
    # the default backend did not handle it
    assert not (tmp_path / "log").exists()


def test_toy_backend_is_found_by_its_file() -> None:
    assert {"hosts", "processes", "toy"} <= set(backends.names())
    assert "--on" in known_flags()


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--on proceses: .* did you mean 'processes'\?"):
        backends.named("proceses")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "hosts", "train.py"], "--on hosts needs the hosts: pass --ips"),
        (
            ["--on", "processes", "--nnodes", "2", "--master", "127.0.0.1:6170", "train.py"],
            "--on processes runs the job on this machine only",
        ),
        (["--on", "toy", "--ips", "10.0.0.1", "train.py"], "--on toy chooses them; omit --ips"),
    ],
)
def test_backend_that_conflicts_with_other_flags_is_refused(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capfd.readouterr().err
