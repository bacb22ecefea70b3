# SPDX-License-Identifier: Apache-2.0
"""Result pages from rounds of measurements: medians, spread, ratios, the machine."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import machine

RESULTS = Path(__file__).parent / "results"


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument(
        "--quick", action="store_true", help="so little that it only shows that it runs; no page"
    )
    return made


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of some rounds, with the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        seen = sorted(values)
        return cls(statistics.median(seen), seen[0], seen[-1])

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.low)}..{short(self.high)})"


@dataclasses.dataclass(frozen=True)
class Series:
    """One variant: its rate and cost in every round."""

    name: str
    rates: Sequence[float]
    cpu_ms: Sequence[float] = ()


@dataclasses.dataclass(frozen=True)
class Ratio:
    """`over` divided by `under`, round by round, and the least the median may be."""

    over: Series
    under: Series
    at_least: float | None = None

    @property
    def rounds(self) -> list[float]:
        """The ratio of the two rates in each round."""
        return [a / b for a, b in zip(self.over.rates, self.under.rates, strict=True)]

    @property
    def spread(self) -> Spread:
        """Median, lowest and highest ratio."""
        return Spread.of(self.rounds)

    def row(self, unit: str = "") -> tuple[str, ...]:
        """A line of the table of ratios."""
        least = "-" if self.at_least is None else at_least(self.spread.median, self.at_least)
        each = " ".join(f"{value:.3f}" for value in self.rounds)
        return f"{self.over.name} / {self.under.name}{unit}", str(self.spread), least, each


def section(
    title: str, series: Sequence[Series], ratios: Sequence[Ratio], foreign: Sequence[float | None]
) -> str:
    """One workload's tables: rates, then ratios, then how busy the machine was."""
    speeds = [(s.name, str(Spread.of(s.rates)), str(Spread.of(s.cpu_ms))) for s in series]
    parts = [
        f"## {title}",
        table(("variant", "steps/s: median (min..max)", "CPU ms per step"), speeds),
        ratio_table("ratio of steps/s", [ratio.row() for ratio in ratios]),
        f"Rounds: {len(series[0].rates)}. {foreign_line(foreign)}",
    ]
    return "\n\n".join(parts)


def ratio_table(what: str, rows: Iterable[Sequence[str]]) -> str:
    """The ratios, round by round."""
    return table((what, "median (min..max)", "at least", "each round"), rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def at_least(value: float, bar: float) -> str:
    """A bar, and whether a value reaches it."""
    return f"{short(bar)}: {'met' if value >= bar else 'missed'}"


def at_most(value: float, bar: float) -> str:
    """A bar, and whether a value stays below it."""
    return f"{short(bar)}: {'met' if value <= bar else 'missed'}"


def foreign_line(shares: Sequence[float | None]) -> str:
    """The share of the machine that other programs used, as a sentence."""
    known = [share for share in shares if share is not None]
    if not known:
        return "Other programs' share of the machine: not known on this system."
    spread = Spread.of(known)
    return (
        f"Other programs' share of the machine: median {spread.median:.0%}, "
        f"highest {spread.high:.0%}."
    )


def page(name: str, claim: str, sections: Iterable[str], quick: bool) -> int:
    """Print sections as they come, and write the page of all unless the run was a quick one."""
    done = []
    for text in sections:
        done.append(text)
        print(text, end="\n\n", flush=True)
    if not quick:
        day = datetime.date.today().isoformat()
        about = table(("machine", ""), machine.describe().items())
        head = [f"# {name}, {day}", claim, f"```sh\n{command_line()}\n```", about]
        path = RESULTS / f"{day}-{name}.md"
        path.write_text("\n\n".join([*head, *done]) + "\n", encoding="utf-8")
        print(f"written: {path}")
    return 0


def command_line() -> str:
    """The command that was run, with absolute paths cut to their last part."""
    script, *arguments = sys.argv
    cut = [re.sub(r"(^|=)/(?:[^/\s]*/)*", r"\1", argument) for argument in arguments]
    return shlex.join(["python", "-m", f"benchmarks.{Path(script).stem}", *cut])


def short(value: float) -> str:
    """A number with its significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")
