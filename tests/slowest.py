# SPDX-License-Identifier: Apache-2.0
"""The page of the slowest tests, from the report of `make test` (`make slowest`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from benchmarks import machine

PAGE = Path(__file__).with_name("slowest.md")
SHOWN = 20


class Timed(NamedTuple):
    """A test function with all its cases."""

    name: str
    seconds: float
    cases: int


def timed(suite: ElementTree.Element) -> list[Timed]:
    """Test functions, the slowest first; a case counts with its fixtures."""
    cases: dict[str, list[float]] = {}
    for case in suite.iter("testcase"):
        name = f"{case.get('classname')}::{str(case.get('name')).partition('[')[0]}"
        cases.setdefault(name, []).append(float(case.get("time", 0)))
    found = [Timed(name, sum(seconds), len(seconds)) for name, seconds in cases.items()]
    return sorted(found, key=lambda each: (-each.seconds, each.name))


def page(suite: ElementTree.Element, about: dict[str, str]) -> str:
    tests = timed(suite)
    total, shown = sum(each.seconds for each in tests), tests[:SHOWN]
    share = sum(each.seconds for each in shown) / (total or 1)
    count, clock = sum(each.cases for each in tests), float(suite.get("time", 0))
    measured = str(suite.get("timestamp"))[:10]
    rows = [f"| `{each.name}` | {each.cases} | {each.seconds:.1f} |" for each in shown]
    return "\n".join(
        [
            "# The slowest tests",
            "",
            f"`make slowest` writes this page from the last `make test`: {measured}.",
            f"{count:,} tests took {total:,.0f} s of both processes together, "
            f"{clock:,.0f} s by the clock;",
            f"these {len(shown)} functions are {share:.0%} of it.",
            "",
            "| test | cases | s |",
            "|---|---|---|",
            *rows,
            "",
            "| machine | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in about.items()),
            "",
        ]
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slowest", description=__doc__)
    parser.add_argument("report", type=Path, help="pytest's --junit-xml")
    report = parser.parse_args(argv).report
    if not report.exists():
        print(f"{report} does not exist: run `make test` first", file=sys.stderr)
        return 1
    [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    PAGE.write_text(page(suite, machine.describe()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
