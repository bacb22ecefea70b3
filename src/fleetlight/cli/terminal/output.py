# SPDX-License-Identifier: Apache-2.0
"""What standard output is: a terminal of some width that shows colours, or a pipe."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import TextIO

from fleetlight.observe.console import Tone, aligned, fitted, painted, wants_colour

#: states of processes and jobs, as each backend names them
_GOOD = re.compile(r"(ended with code 0|completed|succeeded)$", re.IGNORECASE)
_BAD = re.compile(
    r"ended with code|killed by|lost|.*(fail|err|backoff|cancelled|timeout|dead|oom|out_of)",
    re.IGNORECASE,
)
_WAITING = re.compile(r"starting|unknown|pending|configuring|suspended|waiting", re.IGNORECASE)


def columns(stream: TextIO | None = None) -> int | None:
    """The width of the terminal, by default that of standard output; None in a pipe."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return None
    try:
        # a terminal may not know its size
        return os.get_terminal_size(stream.fileno()).columns or None
    except OSError:
        return None


def colour() -> bool:
    """True if standard output gets colours."""
    return wants_colour(os.environ, is_terminal=sys.stdout.isatty())


def say(text: str, tone: Tone = Tone.PLAIN) -> None:
    """Print text in the colour of its tone."""
    print(painted(text, tone, colour()))


def print_fitted(text: str) -> None:
    """Print lines, broken at words where the terminal is narrow."""
    print(fitted(text, columns()), flush=True)


def complain(program: str, error: Exception) -> None:
    """Print an error to standard error."""
    text = fitted(f"{program}: error: {error}", columns(sys.stderr))
    start = f"{program}: error:"
    coloured = wants_colour(os.environ, is_terminal=sys.stderr.isatty())
    print(painted(start, Tone.BAD, coloured) + text.removeprefix(start), file=sys.stderr)


def print_table(rows: Sequence[Sequence[str]], tones: Sequence[Tone] = ()) -> None:
    """Print a table, whose first row has the heads, as wide as the terminal allows."""
    tones = [Tone.DIM, *tones] if tones else []
    print(aligned(rows, columns(), tones if colour() else ()))


def tone_of_state(state: str) -> Tone:
    """The tone of a process in this state."""
    if _GOOD.match(state):
        return Tone.GOOD
    if _BAD.match(state):
        return Tone.BAD
    return Tone.WARNING if _WAITING.match(state) else Tone.PLAIN
