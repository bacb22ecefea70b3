# SPDX-License-Identifier: Apache-2.0
"""Find the process that failed first, and describe its failure."""

from __future__ import annotations

import dataclasses
import pathlib
import signal
from collections.abc import Sequence

from fleetlight.launch.exit_codes import ERROR, PERMANENT, RESUME_CODE, exit_code
from fleetlight.launch.job.layout import JobProcess
from fleetlight.launch.processes.logs import relative
from fleetlight.launch.processes.output.log_errors import (
    last_error,
    last_line,
    last_traceback,
    short,
)
from fleetlight.launch.status import UNKNOWN, ProcessStatus, Stop

#: the usual cause of a signal
_CAUSES = {
    signal.SIGKILL: "often: out of memory",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "often: /dev/shm is full",
    signal.SIGABRT: "abort in native code",
    signal.SIGILL: "native code for another processor",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """The exit of one process."""

    member: JobProcess
    #: the exit code, or -N for signal N
    status: int
    #: when the process raised its last error, else when its exit was seen; on the monotonic clock
    at: float
    #: the last status that the process reported
    reported: ProcessStatus = UNKNOWN
    #: where the job can resume, if the process stopped on request
    stop: Stop | None = None

    @classmethod
    def of(
        cls, member: JobProcess, status: int, reported: ProcessStatus, seen_at: float
    ) -> ProcessExit:
        """The exit of a process with its last reported status; `seen_at` is when it was seen."""
        raised_at = None if reported.error is None else reported.at
        # a process that was killed after it had reported its stop has saved as well
        has_stopped = status == RESUME_CODE or is_killed(status)
        return cls(
            member=member,
            status=status,
            at=seen_at if raised_at is None else raised_at,
            reported=reported,
            stop=reported.stopped if has_stopped else None,
        )

    @property
    def may_restart_alone(self) -> bool:
        """True when the launcher may restart only this process.

        A signal must have ended it: an exit code is an error, even where none is reported.
        """
        return self.status < 0 and self.reported.restartable

    @property
    def has_failed(self) -> bool:
        """True when the job fails with this process."""
        is_fine = self.reported.expendable or self.is_done or self.stop is not None
        return self.status != 0 and not is_fine

    @property
    def is_done(self) -> bool:
        """True when the process was killed after its work was done."""
        return is_killed(self.status) and self.reported.left_job and self.reported.exiting

    @property
    def killed_while_leaving(self) -> bool:
        """True when the process was killed while it disconnected: only servers know how far."""
        return (
            is_killed(self.status) and self.reported.saying_goodbye and not self.reported.left_job
        )

    @property
    def is_root_cause(self) -> bool:
        """True when no running process can be the cause of this failure."""
        has_own_error = self.reported.error is not None and not self.reported.caused_by_peer
        return is_killed(self.status) or has_own_error


def is_killed(status: int) -> bool:
    """True if the process was ended from outside."""
    # an abort comes from inside, often because a peer was lost
    return status < 0 and status != -signal.SIGABRT


def first_failure(exits: Sequence[ProcessExit]) -> ProcessExit | None:
    """The failure that caused the other failures."""
    failed = [exit_ for exit_ in exits if exit_.has_failed]
    order = sorted(
        failed,
        key=lambda exit_: (exit_.reported.caused_by_peer, not is_killed(exit_.status), exit_.at),
    )
    return order[0] if order else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobFailure:
    """Why a job failed, as launchers exchange it and as the user reads it."""

    #: the process and its exit: `worker 1 of 2 exited with code 3`
    what: str
    #: the exit code of fleetrun
    code: int
    #: None if unknown
    after_s: float | None = None
    error: str = ""
    #: the process's own traceback, or the stack where native code ended it
    traceback: str = ""
    log: str = ""
    #: `node 1 (10.0.0.2)` in a job of several machines
    node: str = ""
    #: True when the process failed only because a peer did
    consequence: bool = False
    killed: bool = False
    #: False if a restart would fail again
    may_restart: bool = True
    #: True when the job stopped on request
    stopped: bool = False
    #: True when a signal to fleetrun ended the job
    interrupted: bool = False

    def __str__(self) -> str:
        where = f"{self.node}: " if self.node else ""
        why = f": {self.error}" if self.error else ""
        log = f" (log: {self.log})" if self.log else ""
        after = "" if self.after_s is None else f" after {self.after_s:.1f} s"
        return f"{where}{self.what}{after}{why}{log}"


def failure_of(
    exit_: ProcessExit, log: pathlib.Path | None, *, after_s: float, node: str = ""
) -> JobFailure:
    """The failure of one process, with its cause; no `log`: only the process may have named it."""
    return JobFailure(
        what=f"{exit_.member.title} {how(exit_.status)}",
        code=exit_code(exit_.status),
        after_s=after_s,
        error=_why(exit_, log),
        traceback=_traceback(exit_, log),
        log="" if log is None else relative(log),
        node=node,
        consequence=exit_.reported.caused_by_peer,
        killed=is_killed(exit_.status),
        may_restart=not exit_.reported.permanent and exit_.status != PERMANENT,
    )


def _why(exit_: ProcessExit, log: pathlib.Path | None) -> str:
    error = exit_.reported.error
    if error:
        return short(error) if error != how(exit_.status) else ""
    if log is None:
        return ""
    # a killed process did not log the cause: its last line is unrelated
    return last_error(log) or ("" if is_killed(exit_.status) else last_line(log))


def _traceback(exit_: ProcessExit, log: pathlib.Path | None) -> str:
    """The traceback of the error that ended the process, "" if no error did."""
    reported = exit_.reported.error
    # the code of Python after an uncaught error; other codes are those of the script
    is_uncaught = reported is not None or exit_.status == ERROR or exit_.status < 0
    if log is None or exit_.status == -signal.SIGKILL or not is_uncaught:
        return ""
    return last_traceback(log, reported)


def first_of_all(failures: Sequence[JobFailure]) -> JobFailure | None:
    """The failure that caused those of other machines; `failures` are in order of report."""
    order = sorted(
        failures, key=lambda failure: (failure.stopped, failure.consequence, not failure.killed)
    )
    return order[0] if order else None


def how(status: int) -> str:
    """`exited with code 3`, `was killed by SIGKILL (often: out of memory)`"""
    if status >= 0:
        return f"exited with code {status}"
    try:
        number = signal.Signals(-status)
    except ValueError:
        return f"was killed by signal {-status}"
    cause = f" ({_CAUSES[number]})" if number in _CAUSES else ""
    return f"was killed by {number.name}{cause}"


def restarting_process(
    exit_: ProcessExit, restart: int, left: int, *, has_others: bool = True
) -> str:
    """The line about a process that restarts while the others, if there are any, continue."""
    others = ", the others continue" if has_others else ""
    return (
        f"{exit_.member.title} {how(exit_.status)}; restarting it (restart {restart}, {left} "
        f"left){others}"
    )


def continuing_without(exit_: ProcessExit) -> str:
    """The line about a process without which the others continue."""
    if exit_.is_done:
        return (
            f"{exit_.member.title} {how(exit_.status)} after its script had ended; no work is lost"
        )
    why = f": {exit_.reported.error}" if exit_.reported.error else ""
    return f"{exit_.member.title} {how(exit_.status)}{why}; the others continue without it"
