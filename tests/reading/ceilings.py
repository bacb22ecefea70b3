# SPDX-License-Identifier: Apache-2.0
"""The ceilings in `budget.toml`: what a path opens at most."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.reading.trace import Trace

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BUDGET = Path(__file__).parents[2] / "budget.toml"
Ceilings = dict[str, dict[str, int]]


def read(text: str) -> Ceilings:
    """The ceilings of each path."""
    ceilings: Ceilings = tomllib.loads(text).get("reading", {})
    return ceilings


def exceeded(traces: Mapping[str, Trace], ceilings: Ceilings) -> Iterator[str]:
    """A line for each number above its ceiling, and for each path without one."""
    for name, trace in traces.items():
        numbers = trace.numbers()
        if name not in ceilings:
            yield f"{name} has no ceiling: `python -m tests.reading {name} --lower` writes it"
        for key, ceiling in ceilings.get(name, {}).items():
            if numbers[key] > ceiling:
                yield (
                    f"{name}: {key.replace('_', ' ')} {numbers[key]}, ceiling {ceiling}. Run "
                    f"`python -m tests.reading {name} -v` to see what the path opens, and open "
                    f"less; or raise [reading.{name}] in budget.toml and say in the commit why"
                )


def lowered(text: str, traces: Mapping[str, Trace]) -> str:
    """The budget with the numbers that have fallen, and with paths that had no ceiling."""
    for name, trace in traces.items():
        numbers = trace.numbers()
        section = re.search(rf"^\[reading\.{name}\]\n((?:\w+ = \d+\n)*)", text, re.MULTILINE)
        if section is None:
            keys = ("functions", "files")
            lines = "".join(f"{key} = {numbers[key]}\n" for key in keys)
            text = f"{text.rstrip()}\n\n[reading.{name}]\n{lines}".lstrip()
            continue

        def lower(line: re.Match[str], numbers: Mapping[str, int] = numbers) -> str:
            return f"{line[1]} = {min(int(line[2]), numbers[line[1]])}"

        body = re.sub(r"(\w+) = (\d+)", lower, section[1])
        text = text[: section.start(1)] + body + text[section.end(1) :]
    return text
