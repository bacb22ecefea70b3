# SPDX-License-Identifier: Apache-2.0
"""Docstrings in Google's style, cut into their sections. Pure."""

from __future__ import annotations

import dataclasses
import inspect
import re

_SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Example):$", re.MULTILINE)
_ENTRY = re.compile(r"^([\w.*]+): ", re.MULTILINE)
_ADVICE = re.compile(r"^What to do: (.+?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Docstring:
    """The parts of a docstring."""

    #: everything before the sections, as Markdown
    text: str
    arguments: dict[str, str]
    returns: str
    yields: str
    raises: dict[str, str]
    #: a doctest
    example: str
    #: for errors: what to do
    advice: str

    @property
    def summary(self) -> str:
        """The first sentence."""
        first = " ".join(self.text.split("\n\n")[0].split())
        return re.split(r"(?<=[^.]\.) (?=[A-Z`])", first)[0]


def docstring_of(thing: object) -> Docstring:
    """The docstring of an object, cut into its sections."""
    return parsed(inspect.getdoc(thing) or "")


def parsed(text: str) -> Docstring:
    """The parts of a cleaned docstring."""
    before, *rest = _SECTION.split(text)
    found = {
        name: inspect.cleandoc("\n" + body)
        for name, body in zip(rest[::2], rest[1::2], strict=True)
    }
    advice = _ADVICE.search(before)
    return Docstring(
        text=_ADVICE.sub("", before).strip(),
        arguments=_entries(found.get("Args", "")),
        returns=_joined(found.get("Returns", "")),
        yields=_joined(found.get("Yields", "")),
        raises=_entries(found.get("Raises", "")),
        example=found.get("Example", ""),
        advice=_joined(advice[1]) if advice else "",
    )


def _entries(body: str) -> dict[str, str]:
    """`name: text` entries, whose further lines are indented."""
    found: dict[str, str] = {}
    name = ""
    for line in body.splitlines():
        if match := _ENTRY.match(line):
            name = match[1]
            found[name] = line[match.end() :]
        else:
            found[name] += " " + line.strip()
    return found


def _joined(body: str) -> str:
    return " ".join(body.split())
