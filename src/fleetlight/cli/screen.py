# SPDX-License-Identifier: Apache-2.0
"""The screen of the command line: standard output."""

from __future__ import annotations

import os
import sys


class StandardOutput:
    """Prints the launcher's lines and the job's output; a closed pipe is no error."""

    def __init__(self, verbose: bool = False) -> None:
        #: whether the user wants every detail of the start
        self.verbose = verbose
        self._descriptor: int | None = sys.stdout.fileno()
        self._is_terminal = sys.stdout.isatty()
        self._at_line_start = True

    @property
    def size(self) -> tuple[int, int] | None:
        """(columns, lines) of the terminal; None when the output is no terminal."""
        if not self._is_terminal:
            return None
        try:
            size = os.get_terminal_size(self._descriptor or 0)
        except OSError:
            return None
        return size.columns, size.lines

    def say(self, text: str) -> None:
        """Print one line of the launcher itself."""
        # the output of a worker may end within a line, or a progress bar
        start = "" if self._at_line_start else "\n"
        self.show(f"{start}fleetrun: {text}\n".encode())

    def show(self, data: bytes) -> None:
        """Print output of the job unchanged."""
        if data:
            self._at_line_start = data.endswith(b"\n")
        while data and self._descriptor is not None:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BrokenPipeError:
                self._descriptor = None  # `fleetrun ... | head`: the job and its logs continue
