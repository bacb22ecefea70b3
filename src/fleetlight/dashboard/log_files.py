# SPDX-License-Identifier: Apache-2.0
"""The logs of a job: their names, the last lines, and a search. Every read has a maximum."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_NAME = re.compile(r"(?:worker|server)log\.\d{1,6}")
#: how much of the end of a log is searched, and how much of it is shown
_SEARCHED_BYTES = 32 << 20
_TAIL_BYTES = 1 << 18
_MAX_LINES = 500
_MAX_LINE_BYTES = 2000
_CHUNK = 1 << 20


def log_names(folder: Path) -> list[str]:
    """The logs in a folder."""
    found = [path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda name: (name[0] == "s", int(name.rpartition(".")[2])))


def read_log(folder: Path, name: str, find: str = "") -> dict[str, Any] | None:
    """The last lines of a log, or the last lines that have a text; None: there is no such log."""
    # the name of a file only: it can leave the folder in no way
    if not _NAME.fullmatch(name) or (path := folder / name).is_symlink() or not path.is_file():
        return None
    limit = _SEARCHED_BYTES if find else _TAIL_BYTES
    lines: list[tuple[int, str]] = []
    with path.open("rb") as file:
        size = path.stat().st_size
        begin = max(0, size - limit)
        file.seek(begin)
        wanted = find.casefold()
        for at, line in _lines(file.read, begin, size):
            if wanted in line.decode(errors="replace").casefold():
                text = line[:_MAX_LINE_BYTES].decode(errors="replace")
                lines.append((at, text))
                if len(lines) > 2 * _MAX_LINES:
                    del lines[:-_MAX_LINES]
    kept = lines[-_MAX_LINES:]
    return {"name": name, "bytes": size, "from": begin, "lines": [text for _, text in kept]}


def _lines(read: Any, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The whole lines, and the rest at the end, each with its place."""
    rest, at, is_first = b"", begin, begin > 0
    while at + len(rest) < end and (data := read(min(_CHUNK, end - at - len(rest)))):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            # the first one may have lost its beginning
            if not is_first:
                yield at, line
            is_first = False
            at += len(line) + 1
        if len(rest) > _CHUNK:
            at, rest = at + len(rest), b""
    if rest and not is_first:
        yield at, rest
