# SPDX-License-Identifier: Apache-2.0
"""The fenced blocks of a page, with the heading and the paragraph above each. Pure.

A Python block is saved in the file that the paragraph above it names, such as `train.py`. A diff
block changes that file. The commands of a shell block are typed into a terminal, one line each,
or one whole block where it has a loop.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap

from pages.site import MARK

#: in tabs, fences are indented
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_FILE = re.compile(r"`([\w-]+\.py)`")
_COMMENT = re.compile(r"\s+#\s.*$")
SHELL = ("sh", "bash")


@dataclasses.dataclass(frozen=True)
class PrintedBlock:
    """A fenced block of a page."""

    language: str
    code: str
    heading: str
    #: the paragraph above, if nothing is between
    above: str
    #: the text of the mark of an output; None: no mark
    mark: str | None
    #: where the code is in the page, and its indentation there
    start: int
    end: int
    indent: str

    @property
    def file(self) -> str | None:
        """The file that the paragraph above names; none for a diff of two whole files."""
        if self.code.startswith("--- "):
            return None
        names = _FILE.findall(self.above)
        return names[-1] if names and self.language in ("python", "diff") else None

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, without comments."""
        if re.search(r"^(for|while|if) |\\$", self.code, re.MULTILINE):
            return [self.code.strip()]
        lines = (_COMMENT.sub("", line) for line in self.code.splitlines())
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks_of(text: str) -> list[PrintedBlock]:
    """The blocks of a page in their order."""
    found = []
    heading, before = "", 0
    for match in FENCED.finditer(text):
        between = text[before : match.start()]
        heading = (_HEADING.findall(between) or [heading])[-1]
        marks = MARK.findall(between)
        paragraphs = MARK.sub("", between).strip().split("\n\n")
        indent, language, code = match.groups()
        found.append(
            PrintedBlock(
                language=language,
                code=textwrap.dedent(code) if indent else code,
                heading=heading,
                above=paragraphs[-1],
                mark=marks[-1].strip() if marks else None,
                start=match.start(3),
                end=match.end(3),
                indent=indent,
            )
        )
        before = match.end()
    return found


def section(text: str, heading: str) -> list[PrintedBlock]:
    """The blocks below a heading, up to the next one."""
    found = [block for block in blocks_of(text) if block.heading == heading]
    if not found:
        raise ValueError(f"the page has no heading {heading!r} with blocks below it")
    return found


def edited(text: str, diff: str) -> str:
    """A file after the change of a diff block, which may begin in the middle of a file."""
    sides: tuple[list[str], list[str]] = ([], [])
    for line in diff.splitlines():
        for side, sign in zip(sides, "-+", strict=True):
            if line[:1] in ("", " ", sign):
                side.append(line[1:])
    old, new = ("".join(f"{line}\n" for line in side) for side in sides)
    if len(re.findall(rf"(?=\n{re.escape(old)})", f"\n{text}")) != 1:
        raise ValueError(f"the lines of the diff are not exactly once in the file:\n{old}")
    return f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
