# SPDX-License-Identifier: Apache-2.0
"""Start and end one process of the job, with all processes that it starts."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from fleetlight.errors import LaunchError
from fleetlight.launch.processes import reaper as reaper_program
from fleetlight.roles.password import PASSWORD

_PR_SET_PDEATHSIG = 1
_REAPER_DEADLINE_S = 5.0
_REAP_EVERY_S = 0.005


class Reaper:
    """The handle of the `reaper` program, which also removes fleetrun's own `folder`."""

    def __init__(self, folder: str = "") -> None:
        # run by path and isolated, since importing the package would take longer than the program
        program = str(pathlib.Path(reaper_program.__file__).resolve())
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", program, *([folder] if folder else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            # the program opens no key
            env={name: value for name, value in os.environ.items() if name != PASSWORD},
        )
        assert self._process.stdin is not None
        self._orders = self._process.stdin.fileno()

    def add_self(self) -> None:
        """Register the calling child, before its program starts."""
        self.add(os.getpid())

    def add(self, group: int) -> None:
        """Register a process group, before its program starts."""
        self._tell(b"add", group)

    def drop(self, group: int) -> None:
        """Forget a group that has ended, since its number may be reused."""
        self._tell(b"drop", group)

    def _tell(self, word: bytes, group: int) -> None:
        # without the reaper the job still runs, but a SIGKILL of fleetrun leaves processes
        with contextlib.suppress(OSError):
            os.write(self._orders, b"%s %d\n" % (word, group))

    def __enter__(self) -> Reaper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            self._process.communicate(timeout=_REAPER_DEADLINE_S)


def _die_with(parent: int, reaper: Reaper) -> Callable[[], None]:
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        reaper.add_self()
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return prepare


class _Process(Protocol):
    """A child process of fleetrun."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class AdoptedProcess:
    """A child process that fleetrun did not start."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit code, -N for signal N, None while the process runs; reaps the process."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; TimeoutExpired if the process still runs after `timeout` seconds."""
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_REAP_EVERY_S)
        return status


class Child:
    """One running process, which leads a process group of its own."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int | None,
        reaper: Reaper,
        keep: Collection[int] = (),
    ) -> None:
        """Without `output` it writes where this process does; it inherits descriptors of `keep`."""
        self._reaper = reaper
        try:
            self._process: _Process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with(os.getpid(), reaper),
                pass_fds=tuple(keep),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise LaunchError(f"cannot start {command[0]}: {error}") from error
        self.pid: int = self._process.pid
        self._status: int | None = None

    @classmethod
    def adopt(cls, process: AdoptedProcess, reaper: Reaper) -> Child:
        """A process that leads a group, whose parent has become fleetrun."""
        child = cls.__new__(cls)
        child._reaper, child._process, child._status = reaper, process, None
        child.pid = process.pid
        reaper.add(process.pid)
        return child

    def poll(self) -> int | None:
        """The exit code, -N for signal N, None while the process runs.

        The process is not reaped: while it is a zombie, its group's number cannot be reused, and
        `signal` and `end` cannot hit another process.
        """
        if self._status is None:
            self._status = _peek(self._process)
        return self._status

    def wait(self) -> int:
        """Wait for the exit code, without reaping the process, as `poll`."""
        while (status := self.poll()) is None:
            if hasattr(os, "waitid"):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            else:
                self._process.wait()
        return status

    def signal(self, number: int) -> None:
        """Send a signal to the whole group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def ask(self, number: int) -> None:
        """Send a signal to the process itself and not to its children."""
        # the process is not reaped before `end`, so the number is still its own
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill what is left of the group, grandchildren included, and reap the process."""
        self.signal(signal.SIGKILL)
        self._reaper.drop(self.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_REAPER_DEADLINE_S)


def _peek(process: _Process) -> int | None:
    if not hasattr(os, "waitid"):
        return process.poll()
    try:
        seen = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return process.poll()
    if seen is None:
        return None
    return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
