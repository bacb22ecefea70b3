# SPDX-License-Identifier: Apache-2.0
"""Records which functions of a package run while a window is open, in all threads of a process.

`site/sitecustomize.py` starts it in every process of a traced job. A window has a number. Opened
`everywhere`, it is a byte of a file that all processes map, so it opens and closes in all of them
at once, and no timer of another thread ends in it: a heartbeat that falls due is no part of a step.
Otherwise only this process records. A function is written down at its first call, because a process
may be killed at any time.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

FOLDER, PACKAGE = "READING_FOLDER", "READING_PACKAGE"
WINDOWS = 256
MODULE = "<module>"
#: how long a window stays open after its call, for the threads and processes that the call woke
SETTLE_S = 0.5


class Recorder:
    """What this process has called in each window."""

    def __init__(self, folder: Path, package: str) -> None:
        self._folder, self._package = folder, package.rstrip(os.sep) + os.sep
        descriptor = os.open(folder / "window", os.O_RDWR)
        self._window = mmap.mmap(descriptor, 1)
        os.close(descriptor)
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Start anew in this process, which may be a fork."""
        self._own = 0
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

        def held(condition: threading.Condition, timeout: float | None = None) -> bool:
            happened = wait(condition, timeout)
            is_timer = timeout is not None and threading.current_thread() != threading.main_thread()
            while is_timer and not happened and self._window[0]:
                happened = wait(condition, 0.02)
            return happened

        threading.Condition.wait = held  # type: ignore[method-assign]

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
        if everywhere:
            time.sleep(SETTLE_S)  # what ran before has ended
            self._window[0] = window
        else:
            self._own = window
        try:
            yield
            time.sleep(SETTLE_S)
        finally:
            self._own = 0
            if everywhere:
                self._window[0] = 0


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
