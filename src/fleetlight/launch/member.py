# SPDX-License-Identifier: Apache-2.0
"""Run one process of a job whose engine starts the processes itself (`fleetlight member`)."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from fleetlight.errors import ConfigError, LaunchError
from fleetlight.launch import exit_codes
from fleetlight.launch.failure_reason import FailureReason, write_for_engines
from fleetlight.launch.inventory import cores
from fleetlight.launch.job import environment
from fleetlight.launch.job.layout import JobProcess
from fleetlight.launch.processes.child import Child, Reaper
from fleetlight.launch.processes.failure import (
    ProcessExit,
    continuing_without,
    failure_of,
    how,
    restarting_process,
)
from fleetlight.launch.processes.interrupts import Interrupts
from fleetlight.launch.status import clear_saves_at_sigterm, read
from fleetlight.roles.environment import from_environment
from fleetlight.roles.role import Kind, Role

#: a signal of the user, which does not ask the process to end
_OF_USER = signal.SIGUSR1


def run(
    command: Sequence[str], restarts: int, say: Callable[[str], None], outside: Mapping[str, str]
) -> int:
    """Run the command, and again up to `restarts` times; returns the exit code."""
    if (problem := _problem(command[0], outside.get("PATH"))) is not None:
        code, text = problem
        say(f"error: {text}")
        return code
    with contextlib.ExitStack() as stack:
        try:
            return _MemberShim(command, say, outside, stack).run(restarts)
        except LaunchError as error:
            say(f"error: {error}")
            return exit_codes.NOT_EXECUTABLE


def exit_code(exit_: ProcessExit) -> int:
    """The code by which an engine decides what to do."""
    if exit_.stop is not None:
        return exit_codes.RESUME_CODE
    if exit_.is_done:
        return exit_codes.DONE
    reported = exit_.reported
    if exit_.status > 0 and (reported.permanent or reported.caused_by_peer):
        return exit_codes.failure_code(
            permanent=reported.permanent, caused_by_peer=reported.caused_by_peer
        )
    return exit_codes.exit_code(exit_.status)


def may_restart(exit_: ProcessExit, *, has_others: bool) -> bool:
    """True if a restart of this process alone may help: the others continue only with some."""
    if exit_.stop is not None or exit_.is_done:
        return False
    if has_others:
        return exit_.may_restart_alone
    return not exit_.reported.permanent and exit_codes.may_pass(exit_.status)


class _MemberShim:
    """The processes of one call, one after the other."""

    def __init__(
        self,
        command: Sequence[str],
        say: Callable[[str], None],
        outside: Mapping[str, str],
        stack: contextlib.ExitStack,
    ) -> None:
        self._command, self._say = command, say
        self._role = role = _role(outside)
        self._member = _process(role)
        self._has_others = role.worker_num + role.server_num > 1
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="fleetlight-"))
        stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._error_file = str(self._folder / f"{self._member.kind.value}.json")
        among = (role.local_size or 1) if "FLEET_LOCAL_SIZE" in outside else 1
        self._environment = environment.command_environment(
            outside, max(1, cores() // among), self._error_file
        )
        self._reaper = stack.enter_context(Reaper(str(self._folder)))
        self._child: Child | None = None
        #: signals that came while no process ran
        self._pending: list[int] = []
        self._interrupts = stack.enter_context(Interrupts(_OF_USER, react=self._forward))

    def run(self, restarts: int) -> int:
        began, restarted = time.monotonic(), 0
        while True:
            exit_ = self._run_once()
            is_over = restarted == restarts or self._has_to_stop
            if is_over or not may_restart(exit_, has_others=self._has_others):
                return self._finish(exit_, time.monotonic() - began)
            restarted += 1
            left = restarts - restarted
            self._say(restarting_process(exit_, restarted, left, has_others=self._has_others))
            self._forget(exit_)

    @property
    def _has_to_stop(self) -> bool:
        return any(number != _OF_USER for number in self._interrupts.seen)

    def _run_once(self) -> ProcessExit:
        child = self._child = Child(self._command, self._environment, None, self._reaper)
        try:
            while self._pending:
                child.ask(self._pending.pop(0))
            status = child.wait()
            # before `end`, after which another process may have the number
            self._child = None
            return ProcessExit.of(
                self._member, status, read(self._error_file), seen_at=time.monotonic()
            )
        finally:
            child.end()

    def _forward(self, number: int) -> None:
        """Send a signal to the process and not to its children, which it ends itself."""
        if self._child is None:
            self._pending.append(number)
        else:
            self._child.ask(number)

    def _forget(self, exit_: ProcessExit) -> None:
        """Remove what the next process must not inherit from the report of the last one."""
        if exit_.may_restart_alone:
            clear_saves_at_sigterm(self._error_file)
            return
        # the process is the whole job: it resumes what it has saved
        self._environment = {"FLEET_RESUME": "auto", **self._environment}
        for file in self._folder.iterdir():
            file.unlink()

    def _finish(self, exit_: ProcessExit, after_s: float) -> int:
        code = exit_code(exit_)
        self._say(_last_line(exit_, after_s))
        if exit_.status < 0 and code == exit_codes.exit_code(exit_.status):
            # a process that was killed could not write the reason
            reason = FailureReason(
                role=self._role.kind.value,
                index=self._role.index,
                code=code,
                error=f"{self._member.title} {how(exit_.status)}",
            )
            with contextlib.suppress(OSError):
                write_for_engines(reason)
        return code


def _last_line(exit_: ProcessExit, after_s: float) -> str:
    title = exit_.member.title
    if exit_.stop is not None:
        at = f" at step {exit_.stop.step}" if exit_.stop.step else ""
        return (
            f"{title} stopped{at}, saved in {exit_.stop.folder}; to resume, start all processes "
            "again with FLEET_RESUME=1"
        )
    if exit_.is_done:
        return f"done: {continuing_without(exit_)}"
    if not exit_.status:
        return f"done: {title} exited with code 0 after {after_s:.1f} s"
    return f"failed: {failure_of(exit_, None, after_s=after_s)}"


def _problem(program: str, path: str | None) -> tuple[int, str] | None:
    """Why a program cannot start, with the exit code of shells for that."""
    if shutil.which(program, path=path) is not None:
        return None
    if os.path.isfile(program):
        return exit_codes.NOT_EXECUTABLE, (
            f"{program} is not executable; run chmod +x {program}, or name its interpreter, as in: "
            f"fleetlight member -- python {program}"
        )
    where = f"no such file in {os.getcwd()}" if os.sep in program else f"not in PATH={path or ''}"
    return exit_codes.NOT_FOUND, (
        f"command {program!r} not found: {where}; check its spelling, or give its whole path"
    )


def _role(outside: Mapping[str, str]) -> Role:
    try:
        return from_environment(outside)
    except ConfigError:
        # the process itself reports it
        return Role()


def _process(role: Role) -> JobProcess:
    counts = {Kind.WORKER: role.worker_num, Kind.SERVER: role.server_num, Kind.SCHEDULER: 1}
    return JobProcess(
        kind=role.kind,
        index=-1 if role.index is None else role.index,
        of=counts[role.kind],
        local_rank=role.local_rank or 0,
        local_size=role.local_size or 1,
    )
