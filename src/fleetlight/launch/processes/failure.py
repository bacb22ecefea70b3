# SPDX-License-Identifier: Apache-2.0
"""Find the process that failed first, and describe its failure."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import re
import signal
from collections.abc import Iterator, Sequence

import fleetlight.errors as errors
from fleetlight.errors import FleetError, counted
from fleetlight.launch.exit_codes import ERROR, PERMANENT, RESUME_CODE, exit_code
from fleetlight.launch.job.layout import JobProcess
from fleetlight.launch.processes.logs import relative, tail
from fleetlight.launch.status import UNKNOWN, ProcessStatus, Stop
from fleetlight.observe.console import without_control

#: most lines of a traceback that a user reads; the log has all
_MAX_LINES = 30
#: first lines of a longer one, which show where the script was
_HEAD = 6
#: most lines of the text of an error
_TEXT = 6

_ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit)\b|^Fatal Python error|^terminate ")
#: the module in an exception's name: `fleetlight.errors.` in `fleetlight.errors.ConfigError: x`
_MODULE_PATH = re.compile(r"^([\w<>]+\.)+(?=\w+(:|$))")
#: what `faulthandler` writes first at a signal; the stacks of the threads follow
_CRASH = re.compile(r"^Fatal Python error: (Aborted|Segmentation|Bus|Illegal|Floating)")
_FRAME = re.compile(r'^ +File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_SEPARATOR = re.compile(r"^--- restart \d+ ---$", re.MULTILINE)
#: torch writes the rank of the process before each line of a traceback
_RANK = re.compile(r"^\[rank\d+\]: ?")
_START = re.compile(r"^( +\+ Exception Group )?Traceback \(most recent call last\)")
_CHAIN = re.compile(
    r"^(During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):"
)
#: lines that follow an error and do not belong to it
_FOREIGN = re.compile(r"^(\[fleet |Exception ignored|\[W\d|\[E\d|Traceback )|" + _CHAIN.pattern)
_MAX_LINE_LENGTH = 500
_OWN_ERROR = f"{FleetError.__module__}."
#: the folder of Fleetlight
_PACKAGE = f"{pathlib.Path(errors.__file__).parent}{os.sep}"


def last_error(log: pathlib.Path) -> str:
    """The last exception that a log's last run has, "" if there is none."""
    lines = _filled(_lines(log))
    crash = next((n for n, line in enumerate(lines) if _CRASH.search(line)), None)
    if crash is not None:
        return _crash_summary(lines[:crash], lines[crash:])
    matching = [line for line in lines if _ERROR.search(line)]
    found = _end_of_traceback(lines) or (matching[-1] if matching else "")
    return short(_MODULE_PATH.sub("", found))


def last_line(log: pathlib.Path) -> str:
    """The last line of a log's last run, "" if Fleetlight wrote it."""
    return _last_of(_filled(_lines(log)))


def last_traceback(log: pathlib.Path, reported: str | None) -> str:
    """The traceback of the error that ended the process, at most 30 lines; "" if there is none.

    `reported` is the error as the process reported it: a traceback of another error, which the
    script has caught, is not the cause. None: the last traceback counts.
    """
    lines = _lines(log)
    crash = next((n for n, line in enumerate(lines) if _CRASH.search(line)), None)
    if crash is not None:
        return "\n".join(_stack_of_crash(lines, crash))
    blocks = list(_blocks(lines))
    for number, (_, end, error) in reversed(list(enumerate(blocks))):
        if reported is None or _is_same(lines[error], reported):
            start = _start_of_chain(lines, blocks[: number + 1])
            whole = _without_own_frames(lines[start:end], lines[error])
            if len(whole) > _MAX_LINES:
                whole = _without_own_frames(lines[blocks[number][0] : end], lines[error])
            return "\n".join(_cut(whole))
    return ""


def short(line: str) -> str:
    """One line of text, shortened if it is very long."""
    line = " ".join(line.split())
    return line if len(line) <= _MAX_LINE_LENGTH else line[: _MAX_LINE_LENGTH - 3] + "..."


def _lines(log: pathlib.Path) -> list[str]:
    """The lines of the last run, without colours and ranks."""
    data = without_control(tail(log)).decode(errors="replace")
    text = _SEPARATOR.split(data)[-1]
    return [_RANK.sub("", line.rstrip()) for line in text.splitlines()]


def _filled(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.strip()]


def _blocks(lines: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """The tracebacks: the first line, the line after the last, and the line with the error."""
    for start, line in enumerate(lines):
        if not _START.match(line):
            continue
        error = next((n for n in range(start + 1, len(lines)) if _is_unindented(lines[n])), None)
        if error is not None:
            text = itertools.takewhile(
                lambda n: lines[n].strip() and not _FOREIGN.match(lines[n]),
                range(error + 1, min(len(lines), error + _TEXT)),
            )
            yield start, max(text, default=error) + 1, error


def _is_unindented(line: str) -> bool:
    return bool(line) and not line[0].isspace()


def _is_same(line: str, reported: str) -> bool:
    """True if a line of the log has the class of the reported error."""
    kind = reported.partition(":")[0]
    return _MODULE_PATH.sub("", line).partition(":")[0] == kind


def _start_of_chain(lines: Sequence[str], blocks: Sequence[tuple[int, int, int]]) -> int:
    """The first line of the errors that led to the last one."""
    start = blocks[-1][0]
    for (earlier, end, _), (later, _, _) in reversed(list(itertools.pairwise(blocks))):
        if not any(_CHAIN.match(line) for line in lines[end:later]):
            break
        start = earlier
    return start


def _without_own_frames(lines: Sequence[str], error: str) -> list[str]:
    """The lines, where runs of Fleetlight's own frames are one line.

    Its own errors say all; where the script called it matters. Other errors may be bugs in it.
    """
    if not error.startswith(_OWN_ERROR):
        return list(lines)
    shown: list[str] = []
    for is_own, frames in itertools.groupby(_frames(lines), key=_is_own_frame):
        found = list(frames)
        left_out = [f"  ... {counted(len(found), 'frame')} inside fleetlight ..."]
        shown += left_out if is_own else [line for frame in found for line in frame]
    return shown


def _frames(lines: Sequence[str]) -> Iterator[list[str]]:
    """The lines of each frame, and each other line alone."""
    frame: list[str] = []
    for line in lines:
        if frame and line.startswith("    "):
            frame.append(line)
            continue
        if frame:
            yield frame
        frame = [line]
    yield frame


def _is_own_frame(frame: Sequence[str]) -> bool:
    return frame[0].startswith(f'  File "{_PACKAGE}')


def _cut(lines: Sequence[str]) -> list[str]:
    """The lines, without the middle if they are many."""
    if len(lines) <= _MAX_LINES:
        return list(lines)
    left_out = len(lines) - _MAX_LINES + 1
    return [
        *lines[:_HEAD],
        f"  ... {left_out} more lines in the log ...",
        *lines[_HEAD + left_out :],
    ]


def _stack_of_crash(lines: Sequence[str], crash: int) -> list[str]:
    """What native code wrote last, and the stack of the thread that called it."""
    current = next(
        (n for n in range(crash, len(lines)) if lines[n].startswith("Current thread")), None
    )
    stack = [] if current is None else itertools.takewhile(str.strip, lines[current:])
    wrote = [line for line in lines[max(0, crash - 3) : crash] if line.strip()]
    return _cut([*wrote, lines[crash], *stack])


def _crash_summary(before: Sequence[str], stacks: Sequence[str]) -> str:
    """What native code wrote as it ended the process, and where the script had called it."""
    current = next((n for n, line in enumerate(stacks) if line.startswith("Current thread")), 0)
    frame = _FRAME.search(stacks[current + 1]) if current else None
    where = f"at {frame['file']}:{frame['line']} in {frame['function']}" if frame else ""
    wrote = ""
    if "Aborted" in stacks[0]:
        named = [line for line in before[-3:] if _ERROR.search(line)]
        wrote = short(named[-1]) if named else _last_of(before)
    return "; ".join(filter(None, (wrote, where)))


def _last_of(lines: Sequence[str]) -> str:
    # a line of Fleetlight, such as "saved ckpt", is not the cause either
    last = lines[-1] if lines else "[fleet "
    return "" if last.startswith("[fleet ") else f"last line: {short(last)}"


def _end_of_traceback(lines: Sequence[str]) -> str:
    for start in reversed(range(len(lines))):
        if lines[start].startswith("Traceback (most recent call last)"):
            return next((line for line in lines[start + 1 :] if not line[0].isspace()), "")
    return ""


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
