# SPDX-License-Identifier: Apache-2.0
"""The template: a process that loads torch once, from which the processes of a job are forked.

Loading torch takes most of the time until a job trains. The template forks and ends, and fleetrun
adopts the forks: the kernel makes it their parent, as if it had started them itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from fleetlight.launch.processes.child import AdoptedProcess, Child, Reaper

_PR_SET_CHILD_SUBREAPER = 36
#: how long modules may take to load, before the processes start without a template
_DEADLINE_S = 120.0
_POLL_S = 0.03
_PATH = "PYTHONPATH"
_HOOK = str(pathlib.Path(__file__).with_name("hook").resolve())


@dataclasses.dataclass(frozen=True)
class Start:
    """What one process starts with: its variables, and the descriptor that it writes to."""

    environment: Mapping[str, str]
    output: int


def fork(
    command: Sequence[str],
    modules: Sequence[str],
    starts: Sequence[Start],
    reaper: Reaper,
    check: Callable[[], None],
) -> list[Child]:
    """Start processes from a template; [] if that is not possible here.

    `check` is called while the template loads the modules, and may raise to end the wait.
    """
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryFile() as output, _adopting() as is_adopting:
        with theirs:
            if not is_adopting:
                return []
            template = Child(
                (sys.executable, *command),
                _environment(starts, theirs.fileno()),
                output.fileno(),
                reaper,
                keep=(theirs.fileno(), *(start.output for start in starts)),
            )
        try:
            ours.sendall(_request(command[0], modules, starts))
            pids = _wait(ours, template, check)
        except OSError:
            return []
        finally:
            template.end()
        children = [Child.adopt(AdoptedProcess(pid), reaper) for pid in pids]
        # a byte for each: they begin when all are registered and have their new parent
        with contextlib.suppress(OSError):
            ours.sendall(b"." * len(pids))
        return children


def _environment(starts: Sequence[Start], channel: int) -> dict[str, str]:
    """The variables that all processes share, and those of the hook."""
    common = _common(starts)
    path = common.pop(_PATH, "")
    added = {_PATH: os.pathsep.join([_HOOK, *([path] if path else [])])}
    return {**common, **added, "FLEET_TEMPLATE": str(channel)}


def _common(starts: Sequence[Start]) -> dict[str, str]:
    return dict(set.intersection(*(set(start.environment.items()) for start in starts)))


def _own(start: Start, common: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process has, and its template has not."""
    items = start.environment.items()
    return {name: value for name, value in items if name == _PATH or name not in common}


def _request(script: str, modules: Sequence[str], starts: Sequence[Start]) -> bytes:
    common = _common(starts)
    request = {
        "modules": list(modules),
        "folder": os.path.dirname(os.path.realpath(script)),
        "launcher": os.getpid(),
        "members": [
            {"environment": _own(start, common), "output": start.output} for start in starts
        ],
    }
    return json.dumps(request).encode() + b"\n"


def _wait(channel: socket.socket, template: Child, check: Callable[[], None]) -> list[int]:
    """The process ids of the forks; [] if the template ends without them or takes too long."""
    told = b""
    end = time.monotonic() + _DEADLINE_S
    while time.monotonic() < end:
        check()
        has_ended = template.poll() is not None
        if select.select([channel], [], [], 0 if has_ended else _POLL_S)[0]:
            received = channel.recv(1 << 16)
            told += received
            if told.endswith(b"\n"):
                return list(json.loads(told))
            has_ended = not received
        if has_ended:
            break
    return []


@contextlib.contextmanager
def _adopting() -> Iterator[bool]:
    """Inside, processes whose parent ends become children of this one; False where none can."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None or prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        yield False
        return
    try:
        yield True
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
