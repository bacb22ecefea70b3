# SPDX-License-Identifier: Apache-2.0
"""Find the error that ended a process in its log: its line, and its traceback."""

from __future__ import annotations

import itertools
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

import fleetlight.errors as errors
from fleetlight.errors import FleetError, counted
from fleetlight.launch.processes.logs import tail
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
