# SPDX-License-Identifier: Apache-2.0
"""Which process failed first, and why, in one line."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import signal
from collections.abc import Sequence

from fleetlight.launch.job.layout import JobProcess
from fleetlight.launch.processes.logs import relative, tail
from fleetlight.launch.status import RESUME_CODE, UNKNOWN, ProcessStatus, Stop

_OFTEN = {
    signal.SIGKILL: "often: out of memory",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "often: /dev/shm is full",
    signal.SIGABRT: "native code gave up",
    signal.SIGILL: "native code for another processor",
}

_ERROR = re.compile(
    r"^[\w.]*(Error|Exception|Interrupt|ProcessExit)\b|^Fatal Python error|^terminate "
)
#: of an exception's name: `fleetlight.errors.` in `fleetlight.errors.ConfigError: x`
_MODULE_PATH = re.compile(r"^([\w<>]+\.)+(?=\w+(:|$))")
_SEPARATOR = re.compile(r"^--- restart \d+ ---$", re.MULTILINE)
_LONGEST = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """The end of one process, as this machine's launcher saw it."""

    member: JobProcess
    #: exit code, or -N for signal N
    status: int
    #: when its last error was raised, else when its end was seen; by the monotonic clock
    at: float
    #: what it has reported in its file
    reported: ProcessStatus = UNKNOWN
    #: where the job can resume, of a process that was asked to stop and has
    stop: Stop | None = None

    @classmethod
    def of(
        cls, member: JobProcess, status: int, reported: ProcessStatus, seen_at: float
    ) -> ProcessExit:
        """From the status that a process has left; its end was seen at `seen_at`."""
        raised_at = None if reported.error is None else reported.at
        # one that was killed after it had reported its stop has saved, too
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
        """True when the launcher may start it again alone.

        An exit code is an error, also of a process that could not tell it, as after os._exit.
        """
        return self.status < 0 and self.reported.restartable

    @property
    def has_failed(self) -> bool:
        """True when the job has failed with it."""
        is_fine = self.reported.expendable or self.is_done or self.stop is not None
        return self.status != 0 and not is_fine

    @property
    def is_done(self) -> bool:
        """True when it was killed, and had nothing more to do."""
        return is_killed(self.status) and self.reported.left_job and self.reported.exiting

    @property
    def killed_while_leaving(self) -> bool:
        """True when it was killed during its goodbye: only servers know whether they heard it."""
        return (
            is_killed(self.status) and self.reported.saying_goodbye and not self.reported.left_job
        )

    @property
    def is_root_cause(self) -> bool:
        """True when no process that is still running can be the cause of this."""
        has_own_error = self.reported.error is not None and not self.reported.caused_by_peer
        return is_killed(self.status) or has_own_error


def is_killed(status: int) -> bool:
    """True for the status of a process that was ended from outside."""
    # An abort comes from inside, often because a peer has gone.
    return status < 0 and status != -signal.SIGABRT


def first_failure(exits: Sequence[ProcessExit]) -> ProcessExit | None:
    """The failure that the others follow from."""
    failed = [one for one in exits if one.has_failed]
    order = sorted(
        failed, key=lambda one: (one.reported.caused_by_peer, not is_killed(one.status), one.at)
    )
    return order[0] if order else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobFailure:
    """Why a job ended: what travels between launchers and what the user reads."""

    #: who and how: `worker 1 of 2 exited with code 3`
    what: str
    #: the exit code of fleetrun for it
    code: int
    #: None when it is not known
    after_s: float | None = None
    error: str = ""
    log: str = ""
    #: `node 1 (10.0.0.2)` in a job of several machines
    node: str = ""
    #: the process failed only because a peer did
    consequence: bool = False
    killed: bool = False
    #: False for what a restart cannot cure
    may_restart: bool = True
    #: True when the job has stopped as it was asked to
    stopped: bool = False

    def __str__(self) -> str:
        where = f"{self.node}: " if self.node else ""
        why = f": {self.error}" if self.error else ""
        log = f" (log: {self.log})" if self.log else ""
        after = "" if self.after_s is None else f" after {self.after_s:.1f} s"
        return f"{where}{self.what}{after}{why}{log}"


def failure_of(
    one: ProcessExit, log: pathlib.Path, *, after_s: float, node: str = ""
) -> JobFailure:
    """The failure of one process, with its reason."""
    return JobFailure(
        what=f"{one.member.title} {how(one.status)}",
        code=exit_code(one.status),
        after_s=after_s,
        error=_why(one, log),
        log=relative(log),
        node=node,
        consequence=one.reported.caused_by_peer,
        killed=is_killed(one.status),
        may_restart=not one.reported.permanent,
    )


def _why(one: ProcessExit, log: pathlib.Path) -> str:
    error = one.reported.error
    if error:
        return _short(error) if error != how(one.status) else ""
    # To a signal the process had nothing to say: its last line is not the reason.
    return last_error(log) or ("" if one.status < 0 else _last_line(log))


def first_of_all(failures: Sequence[JobFailure]) -> JobFailure | None:
    """The failure that those of other machines follow from; `failures` are in order of report."""
    order = sorted(failures, key=lambda one: (one.stopped, one.consequence, not one.killed))
    return order[0] if order else None


def exit_code(status: int) -> int:
    """A process status as a shell tells it: 128 + N for signal N."""
    return status if status >= 0 else 128 - status


def how(status: int) -> str:
    """`exited with code 3`, `was killed by SIGKILL (often: out of memory)`"""
    if status >= 0:
        return f"exited with code {status}"
    try:
        number = signal.Signals(-status)
    except ValueError:
        return f"was killed by signal {-status}"
    often = f" ({_OFTEN[number]})" if number in _OFTEN else ""
    return f"was killed by {number.name}{often}"


def restarting_process(one: ProcessExit, life: int, left: int) -> str:
    """Why one process starts again, while the others wait for it."""
    return (
        f"{one.member.title} {how(one.status)}; starting it again (restart {life}, {left} more "
        "left), the others go on"
    )


def continuing_without(one: ProcessExit) -> str:
    """Why the others go on alone."""
    if one.is_done:
        return f"{one.member.title} {how(one.status)} behind the end of its script: it had done all"
    why = f": {one.reported.error}" if one.reported.error else ""
    return f"{one.member.title} {how(one.status)}{why}; the others go on without it"


def last_error(log: pathlib.Path) -> str:
    """The last exception of the last run in a log; empty when there is none."""
    lines = _lines(log)
    matching = [line for line in lines if _ERROR.search(line)]
    found = _end_of_traceback(lines) or (matching[-1] if matching else "")
    return _short(_MODULE_PATH.sub("", found))


def _last_line(log: pathlib.Path) -> str:
    # a line of our own, such as "saved ckpt", is no reason either
    last = next(reversed(_lines(log)), "[fleet ")
    return "" if last.startswith("[fleet ") else f"last line: {_short(last)}"


def _lines(log: pathlib.Path) -> list[str]:
    text = _SEPARATOR.split(tail(log))[-1]
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _end_of_traceback(lines: Sequence[str]) -> str:
    for start in reversed(range(len(lines))):
        if lines[start].startswith("Traceback (most recent call last)"):
            return next((line for line in lines[start + 1 :] if not line[0].isspace()), "")
    return ""


def _short(line: str) -> str:
    line = " ".join(line.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
