# SPDX-License-Identifier: Apache-2.0
"""Blocks that show outputs, and the same outputs now: `python -m pages outputs` writes them.

A comment above a block marks it:

    <!-- output -->                  of the shell block above, all its commands
    <!-- output of 2 -->             of the second command there
    <!-- output of fleetrun ... -->  of another command
    <!-- output of 2 | tail -n 3 --> of a command, through a filter
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pages.printed.blocks import SHELL, PrintedBlock, blocks_of, edited
from pages.printed.shapes import portable, shape
from pages.printed.terminal import ROOT, Terminal, environment


class Output(NamedTuple):
    """A marked block, with what its command prints now."""

    block: PrintedBlock
    now: str

    @property
    def has_changed(self) -> bool:
        """Whether more than numbers differs."""
        return shape(self.block.code) != shape(self.now)


def marked_pages() -> list[Path]:
    """The pages that have marked blocks."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in pages if any(block.mark is not None for block in parsed(page))]


def parsed(page: Path) -> list[PrintedBlock]:
    """The blocks of a page."""
    return blocks_of(page.read_text(encoding="utf-8"))


def outputs_of(page: Path) -> Iterator[Output]:
    """Run the commands of the marked blocks of a page, in one new folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "examples").symlink_to(ROOT / "examples")
        places = {str(folder): "/home/me", str(ROOT): "/home/me/fleetlight"}
        places[os.uname().nodename] = "node1"
        above: PrintedBlock | None = None
        for block in parsed(page):
            write_file(block, folder)
            if block.mark is not None:
                # as in a new terminal, without the variables of an earlier block
                with Terminal(folder, environment()) as terminal:
                    printed = terminal.run(command_of(block.mark, above))
                yield Output(block, portable(printed.text, places))
            above = block if block.language in SHELL else above


def command_of(mark: str, above: PrintedBlock | None) -> str:
    """The command of a mark."""
    number, rest = re.fullmatch(r"(?:of (\d+)\b)?(.*)", mark, re.DOTALL).groups()  # type: ignore[union-attr]
    if number is None and rest.startswith("of "):
        return f"{{ {rest[3:]}\n}} 2>&1"
    if above is None:
        raise ValueError(f"the mark {mark!r} needs a block of commands above it")
    command = above.commands[int(number) - 1] if number else above.code
    return f"{{ {command}\n}} 2>&1 {rest}"


def write_file(block: PrintedBlock, folder: Path) -> None:
    """Save or change the file of a block, if it has one."""
    if block.file is None:
        return
    path = folder / block.file
    if block.language == "python":
        path.write_text(block.code, encoding="utf-8")
    else:
        path.write_text(edited(path.read_text(encoding="utf-8"), block.code), encoding="utf-8")


def rewritten(text: str, outputs: Sequence[Output], *, numbers: bool = False) -> str:
    """A page with the outputs that have changed; with `numbers` all of them."""
    for block, now in reversed([one for one in outputs if numbers or one.has_changed]):
        code = "".join(f"{block.indent}{line}\n" if line else "\n" for line in now.splitlines())
        text = text[: block.start] + code + text[block.end :]
    return text


def written(pages: Sequence[Path], *, numbers: bool) -> Iterator[str]:
    """Write the outputs of pages that have changed; a line for each page."""
    for page in pages:
        outputs = list(outputs_of(page))
        now = rewritten(page.read_text(encoding="utf-8"), outputs, numbers=numbers)
        page.write_text(now, encoding="utf-8")
        changed = sum(one.has_changed for one in outputs)
        yield f"{page.relative_to(ROOT)}: {changed} of {len(outputs)} outputs have changed"
