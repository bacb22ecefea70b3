# SPDX-License-Identifier: Apache-2.0
"""The screen of the command line: standard output."""

from __future__ import annotations

import os
import sys

from fleetlight.observe.console import Tone, fitted, painted, wants_colour


class StandardOutput:
    """Prints the launcher's lines and the job's output; a closed pipe is no error."""

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        """`quiet`: of the launcher's own lines only failures are printed."""
        #: whether the user wants every detail of the start
        self.verbose = verbose
        self._quiet = quiet
        self._descriptor: int | None = sys.stdout.fileno()
        self._is_terminal = sys.stdout.isatty()
        self._colour = wants_colour(os.environ, is_terminal=self._is_terminal)
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

    def say(self, text: str, tone: Tone = Tone.PLAIN) -> None:
        """Print one line of the launcher itself."""
        if self._quiet and not tone.is_failure:
            return
        # the output of a worker may end within a line, or a progress bar
        start = "" if self._at_line_start else "\n"
        name, colon, words = fitted(f"fleetrun: {text}", self._columns).partition(": ")
        line = painted(f"{name}:", Tone.DIM, self._colour) + " " * bool(colon)
        self.show(f"{start}{line}{painted(words, tone, self._colour)}\n".encode())

    @property
    def _columns(self) -> int | None:
        size = self.size
        # a terminal may not know its size
        return size[0] if size is not None and size[0] > 0 else None

    def block(self, text: str) -> None:
        """Print lines on a new line, without the launcher's name."""
        self.show(("" if self._at_line_start else "\n").encode() + text.encode())

    def show(self, data: bytes) -> None:
        """Print output of the job unchanged."""
        if data:
            self._at_line_start = data.endswith(b"\n")
        while data and self._descriptor is not None:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BrokenPipeError:
                self._descriptor = None  # `fleetrun ... | head`: the job and its logs continue
