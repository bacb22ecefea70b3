# SPDX-License-Identifier: Apache-2.0
"""The real screen: standard output."""

from __future__ import annotations

import os
import sys


class StandardOutput:
    """Shows the launcher's own lines and the job's output; a reader that went away is no error."""

    def __init__(self, verbose: bool = False) -> None:
        #: whether the user wants every detail of the start
        self.verbose = verbose
        self._descriptor: int | None = sys.stdout.fileno()
        self._is_terminal = sys.stdout.isatty()
        self._at_line_start = True

    @property
    def size(self) -> tuple[int, int] | None:
        """(columns, lines) of the terminal, None when it is not one."""
        if not self._is_terminal:
            return None
        try:
            size = os.get_terminal_size(self._descriptor or 0)
        except OSError:
            return None
        return size.columns, size.lines

    def say(self, text: str) -> None:
        """One line of the launcher itself."""
        # A worker may have stopped in the middle of a line, or of a progress bar.
        start = "" if self._at_line_start else "\n"
        self.show(f"{start}fleetrun: {text}\n".encode())

    def show(self, data: bytes) -> None:
        """Output of the job, as it came."""
        if data:
            self._at_line_start = data.endswith(b"\n")
        while data and self._descriptor is not None:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BrokenPipeError:
                self._descriptor = None  # `fleetrun ... | head`: the job and its logs go on
