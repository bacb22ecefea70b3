# SPDX-License-Identifier: Apache-2.0
"""How a process ends: an error or a non-zero `sys.exit` is told to the launcher and the others."""

from __future__ import annotations

import atexit
import builtins
import functools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import msgspec

from fleetlight.errors import ConfigError, PeerError, is_lasting
from fleetlight.fleet.job import current_or_none, set_current
from fleetlight.launch.status import UNKNOWN, ProcessStatus, Stop, read, write
from fleetlight.observe import log
from fleetlight.roles import Role
from fleetlight.roles.environment import error_file

#: how long threads of a script that failed may still run
_THREADS_S = 1.0
#: ends the name of the file in which a process that a worker has started leaves its error
_OF_CHILD = ".child"
#: what Python's exit code is after Ctrl-C, as a shell counts: 128 and the number of the signal
_INTERRUPTED = 128 + signal.SIGINT


class JobExit(SystemExit):
    """What `sys.exit` and `exit` raise in a job: it notices when the interpreter ends for it.

    No hook is called for SystemExit, and most of them are caught or mean success. But before the
    interpreter ends for one it asks for its `code`, and then no Python function is running.
    """

    @property
    def code(self) -> Any:  # type: ignore[override]
        """As in SystemExit."""
        status = self.args[0] if self.args else None
        if sys._getframe().f_back is None and status not in (None, 0) and _ending is not None:
            if isinstance(status, int):
                _ending.fail(f"exited with code {status}", code=status, consequence=False)
            else:
                _ending.fail(f"SystemExit: {status}", code=1, consequence=False)
        return status

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


def watch_the_beginning() -> None:
    """Before `watch_the_end`, when the role is not known yet: an error is told to the launcher.

    A wrong setting comes again and again. Nobody else waits for this process yet.
    """
    file, pid, before = error_file(), os.getpid(), sys.excepthook
    if not file:
        return
    if is_started_reader():
        # the file itself is that of the process that has started this one
        file += _OF_CHILD

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if _ending is None and os.getpid() == pid:
            _write(file, ProcessStatus(error=_said(error), permanent=is_lasting(error)))

    sys.excepthook = hook


def watch_the_end(role: Role) -> None:
    """From now on a bad end of this process is told, and ends it without waiting for anybody.

    A SystemExit that the script raises itself is like its end: the others are told that this
    worker left, and the launcher waits for the exit code.
    """
    global _ending
    if _ending is None:
        _put(sys, "excepthook", _hook_before(sys.excepthook))
        _put(sys, "exit", _exit_before(sys.exit))
        for name in {"exit", "quit"} & set(vars(builtins)):
            _put(builtins, name, _exit_before(getattr(builtins, name)))
    _ending = _Ending(role)


def watch_no_longer() -> None:
    """Ends are Python's own again, unless a launcher is still to be told.

    What somebody has put in the place of ours since stays.
    """
    global _ending
    if _ending is None or _ending.has_launcher:
        return
    _ending = None
    for owner, name, ours, before in _replaced:
        if getattr(owner, name, None) is ours:
            setattr(owner, name, before)
    _replaced.clear()


#: where something of ours is in the place of Python's own: that, and what was there before
_replaced: list[tuple[Any, str, Any, Any]] = []


def _put(owner: Any, name: str, ours: Any) -> None:
    _replaced.append((owner, name, ours, getattr(owner, name)))
    setattr(owner, name, ours)


def report_leaving(role: Role) -> None:
    """Tell the launcher that the script is over, and only its exit code is still to come.

    Others who miss this worker may be gone before it comes.
    """
    _tell(role, exiting=True)


def report_parting(role: Role) -> None:
    """Tell the launcher that this worker is about to say goodbye to the servers."""
    _tell(role, saying_goodbye=True)


def report_left(role: Role) -> None:
    """Tell the launcher that this process has no part in the job any more."""
    _tell(role, left_job=True, restartable=False)


def report_over(role: Role) -> None:
    """Tell the launcher that this server's part is over: all workers have said goodbye to it.

    Another one in its place would find nothing to go on from.
    """
    _tell(role, left_job=True, exiting=True, restartable=False)


def report_returning(role: Role, returns: bool = True) -> None:
    """Tell the launcher whether this process may be started again alone, should it be killed."""
    _tell(role, restartable=returns)


def report_dispensable(role: Role) -> None:
    """Tell the launcher that the others go on without this process, whatever becomes of it."""
    _tell(role, expendable=True)


def report_stops(role: Role) -> None:
    """Tell the launcher that at SIGTERM this process saves, which may take a while."""
    _tell(role, saves_at_sigterm=True)


def report_stopped(role: Role, step: int, folder: str) -> None:
    """Tell the launcher that the job was stopped and can go on; only the exit code is to come."""
    _tell(role, exiting=True, restartable=False, stopped=Stop(step, folder))


def end_badly(error: Exception) -> NoReturn:
    """At the end of the script, where raising would change nothing: as if it had raised `error`."""
    sys.excepthook(type(error), error, error.__traceback__)
    _end_at_once(1)


def _said(error: BaseException) -> str:
    """What it is, and its text if it has one."""
    return f"{type(error).__name__}: {error}".strip(": ")


def _hook_before(before: Callable[..., Any]) -> Callable[..., None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if _ending is not None:
            code = _INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1
            _ending.fail(
                _said(error),
                code=code,
                consequence=isinstance(error, PeerError),
                lasting=is_lasting(error),
            )

    return hook


def _exit_before(before: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    @functools.wraps(before)
    def leave(status: Any = None, /) -> NoReturn:
        if threading.current_thread() is not threading.main_thread():
            before(status)
        raise JobExit(*(() if status is None else (status,)))

    return leave


class _Ending:
    """Tells of the bad end of the process that made it; children it forks end on their own."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._pid = os.getpid()

    @property
    def has_launcher(self) -> bool:
        """True where somebody reads how the process ended."""
        return self._role.error_file is not None

    def fail(self, error: str, *, code: int, consequence: bool, lasting: bool = False) -> None:
        """Tell the launcher and the other workers; a `lasting` error comes again and again."""
        if os.getpid() != self._pid:
            return
        if (cause := _child_error(self._role)) is not None:
            error, consequence, lasting = cause, False, True
        _tell(
            self._role,
            error=error,
            caused_by_peer=consequence,
            permanent=lasting,
            exiting=False,
            restartable=False,
        )
        job = current_or_none()
        if job is None:
            return
        set_current(None)
        job.fail(error, consequence=consequence)
        if not job.group.alone:
            # threads of torch may wait in a collective that never finishes, and would be joined
            atexit.register(_end_at_once, code)
            # so would threads of the script, and before that is called
            threading.Thread(target=_end_soon, args=(code,), daemon=True).start()


_ending: _Ending | None = None


def _child_error(role: Role) -> str | None:
    """The permanent error of a process that this one has started: it only knows that one ended."""
    told = read(f"{role.error_file}{_OF_CHILD}")
    return told.error if told.permanent else None


#: all that the launcher has been told so far
_told = UNKNOWN


def _tell(role: Role, **changes: Any) -> None:
    """Tell the launcher something more; what was told before stands."""
    global _told
    _told = msgspec.structs.replace(_told, **changes)
    if role.error_file:
        _write(role.error_file, _told)


def _write(path: str, status: ProcessStatus) -> None:
    try:
        write(path, status)
    except OSError as problem:
        log.logger.warning("the launcher's error file %s cannot be written: %s", path, problem)


def _end_soon(code: int) -> None:
    """The others of the job wait for what this process holds, and it only for its threads."""
    time.sleep(_THREADS_S)
    main = threading.main_thread()
    names = [t.name for t in threading.enumerate() if not t.daemon and t is not main]
    if names:
        log.logger.warning("failed, and ends without waiting for threads: %s", ", ".join(names))
    _end_at_once(code)


def _end_at_once(code: int) -> NoReturn:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


# -- processes that a worker has started, and that read its script once more
#
# So multiprocessing starts loading processes by spawn or forkserver: each runs all that stands at
# the top of the script, with the environment of the worker, whose place in the job it would take.


def is_started_reader() -> bool:
    """True in a process that only reads the script, to find what it was started for."""
    # as multiprocessing asks itself whether a script lacks its guard
    return bool(vars(multiprocessing.current_process()).get("_inheriting", False))


def refuse_started_reader() -> None:
    """ConfigError in a process that only reads the script."""
    if is_started_reader():
        raise ConfigError(
            "fleet.init was called in a process that a worker has started by spawn or forkserver: "
            "such a process, as of a DataLoader with num_workers, runs the script again up to its "
            "guard; expected fleet.init in the worker alone; put fleet.init and all that follows "
            'it behind if __name__ == "__main__":, or give the DataLoader '
            'multiprocessing_context="fork"'
        )
