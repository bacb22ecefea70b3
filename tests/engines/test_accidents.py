# SPDX-License-Identifier: Apache-2.0
"""Accidents of jobs that any engine starts as members: stops during the start, wrong clocks."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.chaos.incarnations import MEMBERS, Name
from tests.engines.running import ROOT, TOKEN
from tests.launch.workplace import wait_until
from tests.multiprocess.test_dialects import BIN, ROLES, finish, start
from tests.workers import reserved_port

pytestmark = [pytest.mark.long, pytest.mark.multiprocess, pytest.mark.timeout(180)]

HERE = Path(__file__).parent
OUTLIVE = str(HERE.parent / "multiprocess" / "outlive.py")
PATIENT = str(HERE / "patient.py")
#: ended by the signal, as a consequence of that, or saved
STOPPED = {128 + signal.SIGTERM, 69, 75}
AHEAD = {"PYTHONPATH": f"{HERE / 'skewed'}:{ROOT}/src:{ROOT}"}
#: another time since the start of the machine, which programs measure intervals by
OTHER_BOOT = ("unshare", "--time", "--monotonic", "86400", "--boottime", "86400", "--fork")


class Members:
    """Members of a job in a folder, where each has a log."""

    def __init__(self, folder: Path, port: int, *script: str) -> None:
        self._folder, self._script = folder, script
        self.running: dict[Name, subprocess.Popen[bytes]] = {}
        self._common = {
            **{name: v for name, v in os.environ.items() if not name.startswith(ROLES)},
            "PYTHONPATH": f"{ROOT}/src:{ROOT}",
            "OMP_NUM_THREADS": "1",
            "FLEET_JOB": "members",
            "FLEET_TOKEN": TOKEN,
            "FLEET_SERVER_NUM": "2",
            "FLEET_WORKER_NUM": "2",
            "FLEET_MASTER": f"127.0.0.1:{port}",
        }

    def start(self, name: Name, *prefix: str, **variables: str) -> None:
        """Start a member."""
        kind, number = name
        role = {"FLEET_ROLE": kind, "FLEET_INDEX": str(number)}
        shim = [sys.executable, "-m", "fleetlight", "member", "--restarts", "3", "--"]
        with self._log(name).open("wb") as log:
            self.running[name] = subprocess.Popen(
                [*prefix, *shim, sys.executable, *self._script],
                cwd=self._folder,
                env={**self._common, **role, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> dict[Name, int]:
        """The exit codes of all members."""
        return {name: process.wait(100) for name, process in self.running.items()}

    def output(self, name: Name) -> str:
        """What a member has printed so far."""
        return self._log(name).read_text()

    def _log(self, name: Name) -> Path:
        return self._folder / f"log.{name[0]}.{name[1]}"


@contextlib.contextmanager
def members(folder: Path, *script: str) -> Iterator[Members]:
    """None is left afterwards."""
    holder, port = reserved_port()
    made = Members(folder, port, *script)
    try:
        with holder:
            yield made
    finally:
        for process in made.running.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("absent", [("worker", 1), ("server", 0)])
def test_a_stop_before_the_job_has_formed_ends_it(absent: Name, tmp_path: Path) -> None:
    """A preemption during the start: some processes note the signal and some do not."""
    with members(tmp_path, PATIENT, ".") as job:
        for name in set(MEMBERS) - {absent}:
            job.start(name, FLEET_CHECKPOINT="saved", FLEET_DEADLINE_S="8")
        wait_until(lambda: "server 1 of 2 listens" in job.output(("server", 1)), "a server")
        for process in job.running.values():
            process.terminate()
        codes = job.wait()
    assert set(codes.values()) <= STOPPED, codes
    assert not (tmp_path / "saved" / "manifest.json").exists()


def test_a_stop_before_the_script_runs_ends_the_job(tmp_path: Path) -> None:
    with members(tmp_path, PATIENT, ".") as job:
        for name in MEMBERS:
            job.start(name, FLEET_CHECKPOINT="saved", FLEET_DEADLINE_S="8")
        for process in job.running.values():
            process.terminate()
        codes = job.wait()
    # Python itself may not have started
    assert set(codes.values()) <= STOPPED | {-signal.SIGTERM}, codes


def learned(text: str) -> set[tuple[str, str]]:
    found = re.findall(r"LEARNT (\w+) \S+ OWN (\w+)", text)
    assert len(found) == 2, text
    return set(found)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """What the job learns under fleetrun."""
    command = [str(BIN / "fleetrun"), "--server_num", "2", "--worker_num", "2", "--tee", OUTLIVE]
    [code], text = finish([start(command, cwd=tmp_path_factory.mktemp("fleetrun"))])
    assert code == 0, text
    return learned(text)


@pytest.mark.parametrize(
    ("prefix", "variables"),
    [((), AHEAD), pytest.param(OTHER_BOOT, {}, marks=pytest.mark.netns)],
    ids=["wall", "monotonic"],
)
def test_clocks_of_machines_may_differ(
    expected: set[tuple[str, str]],
    prefix: tuple[str, ...],
    variables: Mapping[str, str],
    tmp_path: Path,
) -> None:
    """A killed worker and a killed server recover, each with a clock of its own."""
    if prefix and os.geteuid() != 0:
        pytest.skip("a clock of its own needs root")
    with members(tmp_path, OUTLIVE, "--die", "1:3:step", "--kill", "7") as job:
        for name in MEMBERS:
            is_off = name[1] == 1
            job.start(name, *prefix * is_off, **dict(variables) if is_off else {})
        codes = job.wait()
        text = "".join(map(job.output, MEMBERS))
    assert set(codes.values()) == {0}, text
    assert text.count("killed by SIGKILL") == 2
    assert learned(text) == expected
