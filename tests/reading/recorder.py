# SPDX-License-Identifier: Apache-2.0
"""Records which functions of a package run while a window is open, in all threads of a process.

`site/sitecustomize.py` starts it in every process of a traced job. A window has a number. Opened
`everywhere`, it is a byte of a file that all processes map, so it opens and closes in all of them
at once; otherwise only this process records. While a window is open, no timer of another thread
ends: a heartbeat that happens to fall due is no part of a step. A function is written down at its
first call, because a process may be killed at any time.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER, PACKAGE = "READING_FOLDER", "READING_PACKAGE"
WINDOWS = 256
MODULE = "<module>"
#: how long a window stays open after its call, for the threads and processes that the call woke
SETTLE_S = 0.5
#: the longest that a timer is held
HELD_S = 30.0


class Recorder:
    """What this process has called in each window."""

    def __init__(self, folder: Path, package: str) -> None:
        self._folder, self._package = folder, package.rstrip(os.sep) + os.sep
        self._lock = os.open(folder / "window", os.O_RDWR)
        #: the window that is recorded, and how many processes have opened one
        self._window = mmap.mmap(self._lock, 2)
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Begin to record in this process, which may be a fork."""
        self._own, self._caller = 0, 0
        self._known: dict[int, tuple[CodeType, set[int]]] = {}
        role = os.environ.get("FLEET_ROLE", "process") + os.environ.get("FLEET_INDEX", "")
        path = self._folder / f"{role}-{os.getpid()}"
        self._file = os.open(f"{path}.calls", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        counts = os.open(f"{path}.counts", os.O_RDWR | os.O_CREAT)
        os.ftruncate(counts, 2 * WINDOWS * array("Q").itemsize)
        both = memoryview(mmap.mmap(counts, 0)).cast("Q")
        os.close(counts)
        self._calls, self._depths = both[:WINDOWS], both[WINDOWS:]

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call of the package; for `sys.setprofile`."""
        if event != "call":
            return
        window = self._own or self._window[0]
        code = frame.f_code
        if not window or not code.co_filename.startswith(self._package):
            return
        if is_function(code):
            self._calls[window] += 1
            self._depths[window] = max(self._depths[window], self._depth(frame))
        known = self._known.setdefault(id(code), (code, set()))[1]
        if window not in known:
            known.add(window)
            name = getattr(code, "co_qualname", code.co_name)  # new in Python 3.11
            kind = "function" if is_function(code) else code.co_name
            file = code.co_filename.removeprefix(self._package)
            fields = (window, time.monotonic_ns(), file, code.co_firstlineno, name, kind)
            os.write(self._file, ("\t".join(map(str, fields)) + "\n").encode())

    def hold_timers(self) -> None:
        """Let a wait of another thread that ends without an event last until no window is open."""
        wait = threading.Condition.wait

        def held(condition: Any, timeout: float | None = None) -> bool:
            happened = wait(condition, timeout)
            end = time.monotonic() + HELD_S
            while timeout is not None and not happened and self._holds(end):
                happened = wait(condition, 0.02)
            return happened

        threading.Condition.wait = held  # type: ignore[assignment,method-assign]

    def _holds(self, end: float) -> bool:
        is_open = bool(self._own or self._window[1])
        return is_open and threading.get_ident() != self._caller and time.monotonic() < end

    def _depth(self, frame: FrameType | None) -> int:
        """The functions of the package on the stack."""
        depth = 0
        while frame is not None:
            code = frame.f_code
            depth += code.co_filename.startswith(self._package) and is_function(code)
            frame = frame.f_back
        return depth

    @contextlib.contextmanager
    def open(self, window: int, *, everywhere: bool) -> Iterator[None]:
        """Record what runs meanwhile."""
        self._caller = threading.get_ident()
        if everywhere:
            self._count(1)
            time.sleep(SETTLE_S)  # what ran before ends, such as a heartbeat on its way
            self._window[0] = window
        else:
            self._own = window
        try:
            yield
            time.sleep(SETTLE_S)
        finally:
            self._own, self._caller = 0, 0
            if everywhere:
                self._count(-1)
                while self._window[1]:  # what comes next is no part of the path of another process
                    time.sleep(0.01)

    def _count(self, change: int) -> None:
        """A process opens or closes a window; the last one closes it for all."""
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._window[1] += change
        if not self._window[1]:
            self._window[0] = 0
        fcntl.flock(self._lock, fcntl.LOCK_UN)


def is_function(code: CodeType) -> bool:
    """False for a lambda, a comprehension, and the body of a class or a module."""
    return bool(code.co_flags & 1) and not code.co_name.startswith("<")


_recorder: Recorder | None = None


def start() -> None:
    """Record in this process, if its environment says where."""
    global _recorder
    if FOLDER in os.environ and _recorder is None:
        _recorder = Recorder(Path(os.environ[FOLDER]), os.environ[PACKAGE])
        _recorder.hold_timers()
        threading.setprofile(_recorder.profile)
        sys.setprofile(_recorder.profile)


@contextlib.contextmanager
def window(number: int, *, everywhere: bool = True) -> Iterator[None]:
    """Record what runs meanwhile; this process must be traced."""
    assert _recorder is not None, f"this process is not traced: {FOLDER} is not set"
    with _recorder.open(number, everywhere=everywhere):
        yield
