# SPDX-License-Identifier: Apache-2.0
"""Text for terminals and pipes: colours, and lines that fit a narrow terminal. Pure."""

from __future__ import annotations

import enum
import re
import textwrap
from collections.abc import Mapping, Sequence

#: escape sequences: CSI (colours, cursor), OSC (titles), and two-byte ones
_CONTROL = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_=>])")
#: terminals of fewer columns get their lines broken at words; wider ones break lines themselves
_NARROW = 72
_INDENT = "  "


class Tone(enum.Enum):
    """What a line means, which decides its colour; the value is the code of ECMA-48."""

    PLAIN = ""
    #: less important than what is around it
    DIM = "2"
    GOOD = "32"
    #: something has failed, and the job continues
    WARNING = "33"
    BAD = "31"

    @property
    def is_failure(self) -> bool:
        """True for what a user reads who wants to know of failures only."""
        return self in (Tone.WARNING, Tone.BAD)


def wants_colour(environment: Mapping[str, str], *, is_terminal: bool) -> bool:
    """True if text gets colours; NO_COLOR takes precedence over FORCE_COLOR, as in Python."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return is_terminal and environment.get("TERM") != "dumb"


def painted(text: str, tone: Tone, colour: bool) -> str:
    """The text in the colour of its tone, or unchanged without colours."""
    if not colour or not tone.value or not text:
        return text
    return f"\x1b[{tone.value}m{text}\x1b[0m"


def without_control(data: bytes) -> bytes:
    """The data without colours, cursor movements and titles."""
    return _CONTROL.sub(b"", data)


def fitted(text: str, columns: int | None) -> str:
    """The text, broken at words if the terminal is narrow; words themselves stay whole."""
    if columns is None or columns >= _NARROW:
        return text
    return "\n".join(_broken(line, columns, _INDENT) for line in text.split("\n"))


def _broken(line: str, columns: int, indent: str) -> str:
    parts = textwrap.wrap(
        line,
        max(columns, len(indent) + 1),
        subsequent_indent=indent,
        # a user copies paths and commands
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(parts)


def aligned(
    rows: Sequence[Sequence[str]], columns: int | None = None, tones: Sequence[Tone] = ()
) -> str:
    """Rows as lines, each column as wide as its widest word; the first row has the heads.

    Where the lines do not fit into `columns`, each row becomes a few lines `head: word`. `tones`
    colours the rows.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    if columns is not None and max(map(len, lines)) > columns:
        lines = [_stacked(rows[0], row, columns) for row in rows[1:]]
        tones = tones[1:]
    if tones:
        lines = [_painted_lines(line, tone) for line, tone in zip(lines, tones, strict=True)]
    return "\n".join(lines)


def _stacked(heads: Sequence[str], row: Sequence[str], columns: int) -> str:
    """The first word of a row, and under it the others with their heads."""
    lines = [row[0]]
    for head, word in zip(heads[1:], row[1:], strict=True):
        if word:
            text = f"{_INDENT}{head}: {word}" if head else f"{_INDENT}{word}"
            lines.append(_broken(text, columns, _INDENT * 2))
    return "\n".join(lines)


def _painted_lines(text: str, tone: Tone) -> str:
    return "\n".join(painted(line, tone, True) for line in text.split("\n"))
