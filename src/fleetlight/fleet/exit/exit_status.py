# SPDX-License-Identifier: Apache-2.0
"""Reports errors and non-zero exits of a process to the launcher and to the other processes."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import functools
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import msgspec

from fleetlight.errors import ConfigError, PeerError, is_lasting
from fleetlight.fleet.job import current_or_none, set_current
from fleetlight.fleet.parts.background import in_main_thread
from fleetlight.launch import exit_codes
from fleetlight.launch.exit_codes import ERROR, PEER_FAILED, PERMANENT
from fleetlight.launch.failure_reason import FailureReason, write_for_engines
from fleetlight.launch.status import UNKNOWN, ProcessStatus, Stop, read, write
from fleetlight.observe import log
from fleetlight.roles import Role
from fleetlight.roles.environment import error_file

#: how long the threads of a failed script may still run
_THREADS_S = 1.0
#: suffix of the file in which a child process of a worker reports its error
_OF_CHILD = ".child"


class JobExit(SystemExit):
    """What `sys.exit` and `exit` raise in a job: it notices that the interpreter ends with it.

    Python calls no hook for SystemExit, and scripts may catch it. But the interpreter reads `code`
    just before it ends, when no Python function is running.
    """

    @property
    def code(self) -> Any:  # type: ignore[override]
        status = self.args[0] if self.args else None
        if sys._getframe().f_back is None and status not in (None, 0) and _reporter is not None:
            if isinstance(status, int):
                _reporter.exit(f"exited with code {status}", status)
            else:
                _reporter.exit(f"SystemExit: {status}", ERROR)
        return status

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


def install_startup_hook() -> None:
    """Report errors before `fleet.init`, when the role is not known, to the launcher.

    A wrong setting would fail again after a restart. No other process waits for this one yet. At a
    crash in native code the log gets the stack of each thread, which the launcher reads.
    """
    if not error_file():
        return
    if not faulthandler.is_enabled():
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # no stderr with a descriptor
            faulthandler.enable()
    install_error_hook()


def install_error_hook() -> None:
    """Report an uncaught error from now on, and exit with its code."""
    global _hook
    if _hook is None or sys.excepthook is not _hook:
        _hook = _hook_around(sys.excepthook)
        _replace(sys, "excepthook", _hook)


def install_exit_hooks(role: Role) -> None:
    """Report a failure of this process from now on, and end it without waiting for others.

    A SystemExit that the script raises itself counts as a normal end: the others learn that this
    worker left, and the launcher waits for the exit code.
    """
    global _reporter
    if _reporter is None:
        _replace(sys, "exit", _exit_around(sys.exit))
        for name in {"exit", "quit"} & set(vars(builtins)):
            _replace(builtins, name, _exit_around(getattr(builtins, name)))
    _reporter = _FailureReporter(role)


def remove_exit_hooks() -> None:
    """Restore Python's own functions, unless a launcher still needs the report.

    A function that the script has put in the place of ours stays.
    """
    global _reporter, _hook
    if error_file() if _reporter is None else _reporter.has_launcher:
        return
    _reporter = _hook = None
    for owner, name, ours, before in reversed(_replaced):
        if getattr(owner, name, None) is ours:
            setattr(owner, name, before)
    _replaced.clear()


#: the hook that reports, if one is installed; earlier ones only call those before them
_hook: Callable[..., None] | None = None
#: by owner and name: our function, and the one that it replaced
_replaced: list[tuple[Any, str, Any, Any]] = []


def _replace(owner: Any, name: str, ours: Any) -> None:
    _replaced.append((owner, name, ours, getattr(owner, name)))
    setattr(owner, name, ours)


def report_joined(role: Role) -> None:
    """Report that the script has called `fleet.init`."""
    _report(role, has_joined=True)


def report_exiting(role: Role) -> None:
    """Report that the script has ended and only its exit code is missing.

    Other processes may notice the missing worker, and end, before the exit code arrives.
    """
    _report(role, exiting=True)


def report_saying_goodbye(role: Role) -> None:
    """Report that this worker is about to leave the servers."""
    _report(role, saying_goodbye=True)


def report_left_job(role: Role) -> None:
    """Report that this process has left the job."""
    _report(role, left_job=True, restartable=False)


def report_server_done(role: Role) -> None:
    """Report that all workers have left this server: a restarted server would find no state."""
    _report(role, left_job=True, exiting=True, restartable=False)


def report_restartable(role: Role, restartable: bool = True) -> None:
    """Report whether the launcher may restart this process alone after it was killed."""
    _report(role, restartable=restartable)


def report_expendable(role: Role) -> None:
    """Report that the others continue without this process, however it ends."""
    _report(role, expendable=True)


def report_saves_at_sigterm(role: Role) -> None:
    """Report that this process saves at SIGTERM, which may take a while."""
    _report(role, saves_at_sigterm=True)


def report_stopped(role: Role, step: int, folder: str) -> None:
    """Report that the job has stopped and can resume; only the exit code is missing."""
    _report(role, exiting=True, restartable=False, stopped=Stop(step, folder))


def exit_with_error(error: Exception) -> NoReturn:
    """End as if the script had raised `error`, for use after the script has ended."""
    sys.excepthook(type(error), error, error.__traceback__)
    _end_at_once(exit_codes.error_code(error))


def _text(error: BaseException) -> str:
    """The class of an error, and its message if it has one."""
    return f"{type(error).__name__}: {error}".strip(": ")


def _hook_around(before: Callable[..., Any]) -> Callable[..., None]:
    pid, is_child = os.getpid(), is_spawned_child()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if hook is not _hook or os.getpid() != pid:
            return
        if is_child:
            _report_child(error)
            return
        stack = "".join(traceback.format_exception(kind, error, trace))
        code = (_reporter or _FailureReporter(None)).fail_with(error, stack)
        _exit_uncaught(code)

    return hook


def _report_child(error: BaseException) -> None:
    """Report the error of a child process to its parent, to which the launcher's file belongs."""
    if file := error_file():
        _write(file + _OF_CHILD, ProcessStatus(error=_text(error), permanent=is_lasting(error)))


def _exit_uncaught(code: int) -> None:
    """Exit with the code of an uncaught error if the interpreter ends with that error.

    A hook chooses the code by raising SystemExit. Others also call hooks: consoles, which continue,
    and `exit_with_error`. Then the outermost frame is not that of a hook.
    """
    outermost = sys._getframe()
    while outermost.f_back is not None:
        outermost = outermost.f_back
    is_called_at_end = outermost.f_code is getattr(sys.excepthook, "__code__", None)
    continues = hasattr(sys, "ps1") or sys.flags.inspect
    if is_called_at_end and not continues and code in (PEER_FAILED, PERMANENT):
        raise SystemExit(code)


def _exit_around(before: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    @functools.wraps(before)
    def leave(status: Any = None, /) -> NoReturn:
        if not in_main_thread():
            before(status)
        raise JobExit(*(() if status is None else (status,)))

    return leave


class _FailureReporter:
    """Reports the failure of the process that made it, not of children that it forks."""

    def __init__(self, role: Role | None) -> None:
        """`role` is None before it is known."""
        self._role = role
        self._error_file = error_file() if role is None else role.error_file
        self._pid = os.getpid()

    @property
    def has_launcher(self) -> bool:
        """True where a launcher reads how the process ended."""
        return self._error_file is not None

    def exit(self, error: str, code: int) -> None:
        """Report that the script exits with a code of its own."""
        self._fail(error, code=code, consequence=False, lasting=False)

    def fail_with(self, error: BaseException, stack: str) -> int:
        """Report an uncaught error; returns the exit code."""
        code = exit_codes.error_code(error) if isinstance(error, KeyboardInterrupt) else None
        return self._fail(
            _text(error),
            code=code,
            # another token is an error of the user
            consequence=isinstance(error, PeerError) and not is_lasting(error),
            lasting=is_lasting(error),
            stack=stack,
        )

    def _fail(
        self, error: str, *, code: int | None, consequence: bool, lasting: bool, stack: str = ""
    ) -> int:
        """Report to launcher, engine and other workers; a restart does not help if `lasting`."""
        if os.getpid() != self._pid:
            return ERROR
        if (cause := _child_error(self._error_file)) is not None:
            error, consequence, lasting = cause, False, True
        if code is None:
            code = exit_codes.failure_code(permanent=lasting, caused_by_peer=consequence)
        _report_to(
            self._error_file,
            error=error,
            caused_by_peer=consequence,
            permanent=lasting,
            exiting=False,
            restartable=False,
        )
        job = current_or_none()
        role = self._role if job is None else job.role
        _write_for_engines(
            FailureReason(
                role=None if role is None else role.kind.value,
                index=None if role is None else role.index,
                code=code,
                error=error,
                caused_by_peer=consequence,
                permanent=lasting,
            ),
            stack,
        )
        if job is None:
            return code
        set_current(None)
        job.fail(error, consequence=consequence)
        if not job.group.alone:
            # Python would join threads of torch that wait in a collective forever
            atexit.register(_end_at_once, code)
            # it joins threads of the script even before it calls that
            threading.Thread(target=_end_soon, args=(code,), daemon=True).start()
        return code


_reporter: _FailureReporter | None = None


def _child_error(file: str | None) -> str | None:
    """The permanent error of a child process; this process sees only that a child has ended."""
    report = read(f"{file}{_OF_CHILD}")
    return report.error if report.permanent else None


#: the last status sent to the launcher
_last_status = UNKNOWN


def _report(role: Role, **changes: Any) -> None:
    """Change some fields of the status that the launcher reads."""
    _report_to(role.error_file, **changes)


def _report_to(file: str | None, **changes: Any) -> None:
    global _last_status
    _last_status = msgspec.structs.replace(_last_status, **changes)
    if file:
        _write(file, _last_status)


def _write(path: str, status: ProcessStatus) -> None:
    try:
        write(path, status)
    except OSError as problem:
        log.logger.warning("cannot write the launcher's error file %s: %s", path, problem)


def _write_for_engines(reason: FailureReason, stack: str) -> None:
    try:
        write_for_engines(reason, stack)
    except OSError as problem:
        log.logger.warning("cannot write the reason of the failure for the engine: %s", problem)


def _end_soon(code: int) -> None:
    """End although threads still run: other processes wait for this one to end."""
    time.sleep(_THREADS_S)
    main = threading.main_thread()
    names = [t.name for t in threading.enumerate() if not t.daemon and t is not main]
    if names:
        log.logger.warning("after the failure, ending these threads: %s", ", ".join(names))
    _end_at_once(code)


def _end_at_once(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


# -- child processes that import the script again
#
# Multiprocessing starts children by spawn or forkserver in this way. Each runs the top level of the
# script with the environment of the worker, and `fleet.init` there would take the worker's place.


def is_spawned_child() -> bool:
    """True in a child process while it imports the script."""
    # multiprocessing's own check for a script without its guard
    return bool(vars(multiprocessing.current_process()).get("_inheriting", False))


def refuse_spawned_child() -> None:
    """ConfigError in a child process that imports the script."""
    if is_spawned_child():
        raise ConfigError(
            "fleet.init was called in a process that a worker has started by spawn or forkserver: "
            "such a process, as of a DataLoader with num_workers, imports the script again; "
            "expected fleet.init in the worker alone; put fleet.init and all that follows it "
            'under if __name__ == "__main__":, or give the DataLoader '
            'multiprocessing_context="fork"'
        )
