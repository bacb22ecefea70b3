# SPDX-License-Identifier: Apache-2.0
"""A pseudo terminal for worker 0, so that its progress bars work in the user's terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import termios
from collections.abc import Callable

from fleetlight.observe.console import without_control

_CHUNK = 1 << 16
_HIDE_CURSOR, _SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


def plain(line: bytes) -> bytes:
    """The final text of a line, without control sequences and overwritten parts."""
    return without_control(line).rstrip(b"\r").rpartition(b"\r")[2]


class PtyFollower:
    """Shows what a process writes to its terminal, and logs it without control sequences."""

    def __init__(
        self, log: int, show: Callable[[bytes], None], size: Callable[[], tuple[int, int] | None]
    ) -> None:
        self._master, self.slave = pty.openpty()
        self._log, self._show, self._size = log, show, size
        self._rest = b""
        self._hides_cursor = False
        self._shown_size: tuple[int, int] | None = None
        os.set_blocking(self._master, False)
        _no_output_processing(self.slave)
        self._resize()

    def started(self) -> None:
        """Close the child's end, without which its exit would go unnoticed."""
        os.close(self.slave)

    def pump(self) -> None:
        """Show and log the output since the last call."""
        self._resize()
        # reading fails with EIO once no process has the other end open
        with contextlib.suppress(OSError):
            while data := os.read(self._master, _CHUNK):
                self._take(data)

    def close(self) -> None:
        """Show and log the rest of the output."""
        self.pump()
        if self._rest:
            self._take(b"\n")
        if self._hides_cursor:
            # the process was killed while it drew
            self._show(_SHOW_CURSOR)
        os.close(self._master)
        os.close(self._log)

    def _take(self, data: bytes) -> None:
        self._show(data)
        if (hidden := data.rfind(_HIDE_CURSOR)) != (shown := data.rfind(_SHOW_CURSOR)):
            self._hides_cursor = hidden > shown
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines:
            os.write(self._log, b"".join(plain(line) + b"\n" for line in lines))

    def _resize(self) -> None:
        size = self._size()
        if size is not None and size != self._shown_size:
            columns, lines = size
            packed = struct.pack("HHHH", lines, columns, 0, 0)
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, packed)
            self._shown_size = size


def _no_output_processing(descriptor: int) -> None:
    # the user's terminal turns \n into \r\n; doing it twice would spoil the log
    mode = termios.tcgetattr(descriptor)
    mode[1] &= ~termios.OPOST
    termios.tcsetattr(descriptor, termios.TCSANOW, mode)
