# SPDX-License-Identifier: Apache-2.0
"""The traced jobs: real processes, whose scripts open a window for each path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.reading.recorder import FOLDER, PACKAGE
from tests.workers import environment, reserved_port

HERE = Path(__file__).parent
SCRIPT = str(HERE / "script.py")
LIMIT_S = 300.0
#: of the traced processes, which are slow
DEADLINE_S = 120.0


class JobFailedError(Exception):
    """A process of a traced job failed; the text has the output of all."""


class Starter:
    """Starts the processes of one job in an empty folder, all traced."""

    def __init__(self, folder: Path, package: Path) -> None:
        self._folder = folder
        self._work = folder / "work"
        self._work.mkdir(parents=True)
        (folder / "window").write_bytes(b"\0\0")
        path = os.pathsep.join([str(HERE / "site"), str(HERE.parents[1])])
        roles = {name for name in os.environ if name.startswith("FLEET_")}
        kept = {name: value for name, value in os.environ.items() if name not in roles}
        traced = {"PYTHONPATH": path, FOLDER: str(folder), PACKAGE: str(package)}
        self._environment = {**kept, **traced, "OMP_NUM_THREADS": "1"}

    def run(self, *processes: tuple[Sequence[str], dict[str, str]]) -> None:
        """Run Python with these arguments and variables side by side, until all have ended."""
        output = self._folder / "output"
        with output.open("a") as written:
            running = [
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env={**self._environment, **variables},
                    cwd=self._work,
                    stdout=written,
                    stderr=subprocess.STDOUT,
                )
                for arguments, variables in processes
            ]
            try:
                codes = [process.wait(LIMIT_S) for process in running]
            finally:
                for process in running:
                    process.kill()
        if any(codes):
            raise JobFailedError(f"exit codes {codes}:\n{output.read_text()}")


def embedded(start: Starter) -> None:
    """One process, which is worker and server."""
    start.run(([str(HERE / "initial.py")], {}))


def sockets(start: Starter, what: str = "sockets") -> None:
    """A worker and a server."""
    ports = [reserved_port() for _ in range(2)]
    served = {"FLEET_SERVER_NUM": "1", "FLEET_SERVER_ENDPOINTS": f"127.0.0.1:{ports[1][1]}"}
    facts = environment(0, 1, ports[0][1], DEADLINE_S) | served
    start.run(*(([SCRIPT, what], facts | {"FLEET_ROLE": role}) for role in ("server", "worker")))
    for holder, _ in ports:
        holder.close()


def logged(start: Starter) -> None:
    """The same with a log."""
    sockets(start, "logged")


def collective(start: Starter, what: str = "collective") -> None:
    """Two workers."""
    holder, port = reserved_port()
    facts = [environment(index, 2, port, DEADLINE_S) for index in range(2)]
    start.run(*(([SCRIPT, what], variables) for variables in facts))
    holder.close()


def program(start: Starter) -> None:
    """Two workers that run a program."""
    collective(start, "program")


def killed(start: Starter) -> None:
    """A worker and a server that `fleetrun` restarts alone."""
    flags = ["--server_num", "1", "--worker_num", "1", "--max_restarts", "9", "--tee"]
    start.run((["-m", "fleetlight.cli.fleetrun", *flags, SCRIPT, "killed"], {}))


def launched(start: Starter) -> None:
    """`fleetrun` with a server and two workers."""
    flags = ["--server_num", "1", "--worker_num", "2"]
    start.run(([str(HERE / "launcher.py"), *flags, SCRIPT, "plain"], {}))


JOBS: dict[str, Callable[[Starter], None]] = {
    job.__name__: job for job in (embedded, sockets, logged, collective, program, killed, launched)
}
