# SPDX-License-Identifier: Apache-2.0
"""The launcher's output: the interface of a screen, and how lines and tables are formatted."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Protocol

from fleetlight.observe.console import Tone

#: what torch and Fleetlight put before lines of a process
_OWN_PREFIX = re.compile(rb"\[(?:rank\d+\]: |fleet )")


class Screen(Protocol):
    """What a backend prints to."""

    @property
    def size(self) -> tuple[int, int] | None:
        """(columns, lines) of the terminal; None when the output is no terminal."""

    @property
    def verbose(self) -> bool:
        """Whether the user wants every detail of the start (`fleetrun -v`)."""

    def say(self, text: str, tone: Tone = Tone.PLAIN) -> None:
        """Print one line of the launcher itself."""

    def block(self, text: str) -> None:
        """Print lines, which end with a newline, without the launcher's name."""

    def show(self, data: bytes) -> None:
        """Print output of the job unchanged."""


class Prefixed:
    """Prints complete lines, each prefixed with the name of its process.

    A line that already names the process gets no second prefix.
    """

    def __init__(self, name: str, show: Callable[[bytes], None]) -> None:
        self._prefix = f"[{name}] ".encode()
        self._named = f"[fleet {name}".encode()
        self._show = show
        self._rest = b""

    def __call__(self, data: bytes) -> None:
        """Print the lines that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines:
            self._show(b"".join(self._with_prefix(line) + b"\n" for line in lines))

    def _with_prefix(self, line: bytes) -> bytes:
        own = _OWN_PREFIX.match(line)
        if own is None:
            return self._prefix + line
        if own[0].startswith(b"[rank"):
            return self._prefix + line[own.end() :]
        return line if line.startswith(self._named) else self._prefix + line

    def finish(self) -> None:
        """Print a last line that has no newline."""
        if self._rest:
            self(b"\n")


def arguments_block(pairs: Sequence[tuple[str, object]]) -> str:
    """The parsed arguments as a block of text."""
    rows = [f"{name}: {value}" for name, value in pairs]
    title = "-----------  Configuration Arguments -----------"
    return "\n".join([title, *rows, "-" * len(title)]) + "\n"


def boxed(title: tuple[str, str], rows: Sequence[tuple[str, str]], width: int = 100) -> str:
    """A two-column table. Long values lose their middle, so that both ends of a list show."""
    left = max(len(name) for name, _ in (title, *rows))
    right = min(max(len(value) for _, value in (title, *rows)), width - left - 7)
    line = "+" + "-" * (left + 2) + "+" + "-" * (right + 2) + "+"
    body = [f"| {name:<{left}} | {_cut(value, right):<{right}} |" for name, value in rows]
    head = f"| {title[0]:^{left}} | {title[1]:^{right}} |"
    return "\n".join([line, head, line, *body, line]) + "\n"


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    half = (width - 3) // 2
    return text[: width - 3 - half] + "..." + text[-half:]
