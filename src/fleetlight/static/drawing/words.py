# SPDX-License-Identifier: Apache-2.0
"""How wide a text is, without asking any font, and how it is told in less room."""

from __future__ import annotations

import unicodedata

#: widths in parts of the font's size, as in the widest of the usual fonts
_THIN, _NARROW, _USUAL, _CAPITAL, _WIDE = 0.35, 0.42, 0.65, 0.85, 1.1
_BOLD = 1.12
_SLIM = {**dict.fromkeys(" ijl.,:;|'/\\·", _THIN), **dict.fromkeys("frtIJ!`()[]{}-", _NARROW)}
_BROAD = frozenset("mwMW@%…—")
ELLIPSIS = "…"


def width(text: str, size: float, bold: bool = False) -> float:
    """As much room as a text takes at most."""
    return sum(map(_part, text)) * size * (_BOLD if bold else 1.0)


def _part(letter: str) -> float:
    if letter in _SLIM:
        return _SLIM[letter]
    if letter in _BROAD or unicodedata.east_asian_width(letter) in "WF":
        return _WIDE
    if unicodedata.combining(letter):
        return 0.0
    is_usual = letter.isascii() and not letter.isupper() and letter not in "+=<>~#"
    return _USUAL if is_usual else _CAPITAL


def fitted(text: str, room: float, size: float, bold: bool = False, ends: bool = False) -> str:
    """The text, or as much of its start (`ends`: of its end) as there is room for."""
    if width(text, size, bold) <= room:
        return text
    kept = len(text)
    while kept and width(_cut(text, kept, ends), size, bold) > room:
        kept -= 1
    return _cut(text, kept, ends) if kept else ""


def _cut(text: str, kept: int, ends: bool) -> str:
    return f"{ELLIPSIS}{text[len(text) - kept :]}" if ends else f"{text[:kept]}{ELLIPSIS}"


def counted(number: int, thing: str) -> str:
    """`1 operation`, `2,374 operations`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def rounded(number: int) -> str:
    """`9,408`, `25.6 M`."""
    for size, name in ((10**9, "G"), (10**6, "M"), (10**4, "k")):
        if number >= size:
            return f"{number / (10**3 if name == 'k' else size):.3g} {name}"
    return f"{number:,}"


def mib(size: int) -> str:
    """`25.1 MiB`, `3.2 KiB`, `8 B`."""
    for unit, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << unit:
            number = size / (1 << unit)
            return f"{number:.0f} {name}" if number >= 100 else f"{number:.1f} {name}"
    return f"{size} B"
