# SPDX-License-Identifier: Apache-2.0
"""Rounds of new jobs: one run of every job per round, compared round by round."""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks import machine, report
from benchmarks.jobs import ROOT, BenchmarkError, Command, Job, Run, run


def rounds(
    make: Mapping[str, Callable[[], Job]], count: int, idle_s: float = 0.0, attempts: int = 1
) -> dict[str, list[Run]]:
    """Run `count` rounds; `make[name]()` returns a new job (ports differ between runs).

    A failed job is reported and repeated, up to `attempts` runs: a peer that sometimes does not
    start need not end a long comparison.
    """
    runs: dict[str, list[Run]] = {name: [] for name in make}
    for number in range(count):
        for name in _turned(list(make), number):
            runs[name].append(_run(make[name], idle_s, attempts))
            print(f"round {number + 1}/{count} {name}: {_line(runs[name][-1])}", flush=True)
    return runs


def _run(make: Callable[[], Job], idle_s: float, attempts: int) -> Run:
    for attempt in range(1, attempts + 1):
        machine.wait_until_idle(idle_s)
        try:
            return run(make())
        except BenchmarkError as error:
            if attempt == attempts:
                raise
            print(f"attempt {attempt} failed: {error}", flush=True)
    raise ValueError(f"got {attempts} attempts, expected at least 1")


def series(runs: Mapping[str, Sequence[Run]]) -> dict[str, report.Series]:
    """Rates and CPU cost of each job over the rounds."""
    return {
        name: report.Series(name, [r.rate for r in of], [r.cpu_ms for r in of])
        for name, of in runs.items()
    }


def foreign(runs: Mapping[str, Sequence[Run]]) -> list[float | None]:
    """Other programs' share of the machine during every run."""
    return [one.foreign for of in runs.values() for one in of]


def _turned(names: list[str], by: int) -> list[str]:
    """Rotate the order of jobs in each round."""
    by %= len(names)
    return names[by:] + names[:by]


def _line(one: Run) -> str:
    rate = f"{report.short(one.rate)} steps/s, " if "steps" in one.results[0] else ""
    other = "" if one.foreign is None else f", other programs {one.foreign:.0%}"
    return f"{rate}{report.short(one.wall_s)} s{other}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="comparison", help="name of the result page")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=int, default=1, help="RESULT lines expected of a job")
    parser.add_argument("--deadline_s", type=float, default=600.0)
    parser.add_argument("--idle_s", type=float, default=0.0, help="wait for an idle machine first")
    parser.add_argument(
        "--job", action="append", required=True, metavar="NAME=COMMAND", help="the first is 1.0"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare any commands: `--job NAME=COMMAND` once for each."""
    options = _parse(argv)
    make = {}
    for text in options.job:
        name, _, command = text.partition("=")
        make[name] = functools.partial(
            Job, name, [Command(shlex.split(command))], options.results, options.deadline_s
        )
    runs = rounds(make, options.rounds, options.idle_s)
    first, *rest = series(runs).values()
    ratios = [report.Ratio(one, first) for one in rest]
    text = report.section("Commands", [first, *rest], ratios, foreign(runs))
    path = report.write(options.name, "Commands compared round by round.", [text])
    print(f"{text}\n\nwritten: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
