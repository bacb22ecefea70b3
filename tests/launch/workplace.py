# SPDX-License-Identifier: Apache-2.0
"""Starting real jobs of small scripts that do not import torch."""

import contextlib
import dataclasses
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fleetlight.errors import LaunchError
from fleetlight.launch.processes.ports import reserve

_OUTCOME = re.compile(r"fleetrun: (done: |failed: |(node \d+ \([^)]+\): )?stopped (by|at) )")
#: every wait in these tests ends here; only a broken launcher gets near it
DEADLINE_S = 60.0

#: a job that saves, without torch; servers end after the workers
SAVING = """
    import json, os, pathlib, signal, sys, time
    name, index = os.environ["FLEET_ROLE"], os.environ["FLEET_INDEX"]
    status = pathlib.Path(os.environ["FLEET_ERROR_FILE"])
    def record(number, frame):
        pathlib.Path(f"noted.{name}").touch()
        if sys.argv[1:] == ["late"]:
            return
        if sys.argv[1:] == ["full"]:
            raise SystemExit("disk full")
        stop = {"step": 7, "folder": os.environ["FLEET_CHECKPOINT"]}
        status.write_text(json.dumps({"exiting": True, "stopped": stop}))
        pathlib.Path("saved").touch()
        raise SystemExit(75)
    signal.signal(signal.SIGTERM, record)
    status.write_text(json.dumps({"saves_at_sigterm": True}))
    pathlib.Path(f"pid.{name}").write_text(f"{os.getpid()}\\n")
    while name == "worker" or not os.path.exists("saved"):
        time.sleep(0.01)
"""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until another process makes the condition true."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.01)


def outcome(output: str) -> str:
    """The line of fleetrun about the end of its job; what to do may follow it."""
    lines = output.strip().splitlines()
    return next((line for line in reversed(lines) if _OUTCOME.match(line)), lines[-1])


def is_running(pid: int) -> bool:
    """False for a process that has exited, also while it is a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def free_ports(hosts: Sequence[str], count: int) -> int:
    """The first of `count` consecutive ports that are free now on all hosts.

    They lie below the ephemeral range; each test process searches its own range first.
    """
    first = 10240 + os.getpid() % 1000 * 20
    for start in [*range(first, 30240, count), *range(10240, first, count)]:
        with contextlib.suppress(LaunchError), contextlib.ExitStack() as held:
            for host in hosts:
                for reservation in reserve(host, count, start):
                    held.callback(reservation.close)
            return start
    raise AssertionError("no free ports")


@dataclasses.dataclass
class Job:
    """A running fleetrun."""

    process: subprocess.Popen[str]
    #: the output read so far
    printed: str = ""

    def wait_for_line(self, text: str) -> None:
        """Read the output up to a line with this text."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if text in line:
                return
        raise AssertionError(f"the job ended without {text!r}:\n{self.printed}")

    def end(self) -> tuple[int, str]:
        """The exit code and all output."""
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, self.printed + output


class Workplace:
    """A folder with scripts, in which jobs start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.jobs: list[Job] = []
        #: a prefix of the command, to start it in another place
        self.prefix: tuple[str, ...] = ()

    def script(self, text: str, name: str = "train.py") -> str:
        """Write a script; returns its name."""
        (self.path / name).write_text(textwrap.dedent(text))
        return name

    def start(self, *arguments: str, **environment: str) -> Job:
        """Start fleetrun in this folder."""
        process = subprocess.Popen(
            [*self.prefix, sys.executable, "-m", "fleetlight.launch", *arguments],
            cwd=self.path,
            env={**os.environ, "PYTHONWARNINGS": "", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.jobs.append(Job(process))
        return self.jobs[-1]

    def run(self, *arguments: str, **environment: str) -> tuple[int, str]:
        """Run fleetrun in this folder to its end."""
        return self.start(*arguments, **environment).end()

    def run_on_terminal(
        self, *arguments: str, columns: int = 100, **environment: str
    ) -> tuple[int, str]:
        """Run fleetrun in a terminal to its end; the exit code, and what the terminal got."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        process = subprocess.Popen(
            [sys.executable, "-m", "fleetlight.launch", *arguments],
            cwd=self.path,
            env={**os.environ, "TERM": "xterm", **environment},
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        shown = b""
        # the other end is closed: all output has been read
        with contextlib.suppress(OSError):
            while data := os.read(ours, 1 << 16):
                shown += data
        os.close(ours)
        return process.wait(timeout=DEADLINE_S), shown.decode().replace("\r\n", "\n")

    def log(self, name: str, folder: str = "log") -> str:
        """A log of the last run."""
        return (self.path / folder / name).read_text()

    def wait_for(self, name: str) -> str:
        """Wait for a file that a script writes; returns its content."""
        file = self.path / name
        wait_until(lambda: file.exists() and file.read_text().endswith("\n"), str(file))
        return file.read_text()
