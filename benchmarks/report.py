# SPDX-License-Identifier: Apache-2.0
"""Result pages from rounds of measurements: medians, spread, ratios, the machine."""

from __future__ import annotations

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
    cpu_ms: Sequence[float]


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

    @property
    def verdict(self) -> str:
        """Whether the median reaches `at_least`."""
        if self.at_least is None:
            return "-"
        word = "met" if self.spread.median >= self.at_least else "missed"
        return f"{short(self.at_least)}: {word}"


def section(
    title: str, series: Sequence[Series], ratios: Sequence[Ratio], foreign: Sequence[float | None]
) -> str:
    """One workload's tables: rates, then ratios, then how busy the machine was."""
    speeds = [(s.name, str(Spread.of(s.rates)), str(Spread.of(s.cpu_ms))) for s in series]
    shown = [
        (f"{r.over.name} / {r.under.name}", str(r.spread), r.verdict, _listed(r.rounds))
        for r in ratios
    ]
    parts = [
        f"## {title}",
        table(("variant", "steps/s: median (min..max)", "CPU ms per step"), speeds),
        table(("ratio of steps/s", "median (min..max)", "at least", "each round"), shown),
        f"Rounds: {len(series[0].rates)}. {foreign_line(foreign)}",
    ]
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


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


def write(name: str, claim: str, sections: Sequence[str], folder: Path = RESULTS) -> Path:
    """Write today's result page of benchmark `name`; a second run of a day replaces the first."""
    day = datetime.date.today().isoformat()
    rows = [(key, value) for key, value in machine.describe().items()]
    parts = [
        f"# {name}, {day}",
        claim,
        f"```sh\n{command_line()}\n```",
        table(("machine", ""), rows),
        *sections,
    ]
    path = folder / f"{day}-{name}.md"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


def page(name: str, claim: str, sections: Iterable[str], *, keep: bool = True) -> None:
    """Print sections as they come, and write the page of all if it is to be kept."""
    done = []
    for section in sections:
        done.append(section)
        print(section, end="\n\n", flush=True)
    if keep:
        print(f"written: {write(name, claim, done).relative_to(RESULTS.parent.parent)}")


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command that was run, with absolute paths cut to their last part."""
    script, *arguments = sys.argv if argv is None else argv
    cut = [re.sub(r"(^|=)/(?:[^/\s]*/)*", r"\1", argument) for argument in arguments]
    return shlex.join(["python", "-m", f"benchmarks.{Path(script).stem}", *cut])


def short(value: float) -> str:
    """A number with its significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")


def _listed(values: Iterable[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
