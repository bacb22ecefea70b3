# SPDX-License-Identifier: Apache-2.0
"""Reads the YAML that Fleetlight writes: blocks, with texts and numbers as in JSON."""

import json
import re
from typing import Any

_ENTRY = re.compile(r'("(?:[^"\\]|\\.)*"|[\w.-]+):(?: (.*))?')


def read(text: str) -> list[dict[str, Any]]:
    """The documents in the text."""
    parts = [part.splitlines() for part in text.split("---\n") if part]
    return [_block(lines) for lines in parts]


def _block(lines: list[str]) -> Any:
    """The value of lines without common indentation."""
    if lines[0].startswith("- "):
        return [_block(part) for part in _parts(lines, lambda line: line.startswith("- "))]
    if _ENTRY.fullmatch(lines[0]) is None:
        [line] = lines
        return json.loads(line)
    return dict(_entry(part) for part in _parts(lines, lambda line: not line.startswith(" ")))


def _parts(lines: list[str], begins: Any) -> list[list[str]]:
    """The lines of each item; those of a list lose their dash."""
    parts: list[list[str]] = []
    for line in lines:
        dashed = lines[0].startswith("- ")
        if begins(line):
            parts.append([])
        parts[-1].append(line[2:] if dashed else line)
    return parts


def _entry(lines: list[str]) -> tuple[str, Any]:
    found = _ENTRY.fullmatch(lines[0])
    assert found is not None, lines
    key = json.loads(found[1]) if found[1].startswith('"') else found[1]
    if found[2] is not None:
        return key, json.loads(found[2])
    return key, _block([line[2:] for line in lines[1:]])
