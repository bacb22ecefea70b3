# SPDX-License-Identifier: Apache-2.0
"""This checkout beside another one: parameter servers in every mode, jobs that take turns.

`--other` is the folder `src` of a checkout of the other version; one interpreter runs both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import report, turns
from benchmarks.jobs import BenchmarkError
from benchmarks.ps_jobs import Ours
from benchmarks.ps_models import TITLES

CLAIM = (
    "Wide & deep and word2vec, one server and two workers: this version makes at least 0.97 of the "
    "steps per second of the version before, in every mode."
)
THIS, OTHER = "this version", "the version before"
AT_LEAST = 0.97
#: the mode of the job, and the bound of async
MODES: dict[str, tuple[str, int | None]] = {
    "sync": ("sync", None),
    "async": ("async", None),
    "async, staleness 4": ("async", 4),
    "geo": ("geo", None),
}
#: more than anybody waits for: jobs are ended when all have had their turns
_ENDLESS = 10_000_000


def variants(model: str, mode: str, other: str) -> dict[str, Ours]:
    """By name; they differ in the version alone."""
    kind, staleness = MODES[mode]
    return {
        name: Ours(name, model, kind, _ENDLESS, staleness=staleness, count=True, source=source)
        for name, source in ((THIS, ""), (OTHER, other))
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    options = _parse(argv)
    other = Path(options.other).absolute()
    if not (other / "fleetlight").is_dir():
        raise BenchmarkError(f"--other: no fleetlight in {other}; give the src of a checkout")
    report.page("two_versions", CLAIM, _sections(options, str(other)), keep=options.write)
    return 0


def _sections(options: argparse.Namespace, other: str) -> Iterator[str]:
    for model in options.models:
        for mode in options.modes:
            make = {name: one.job for name, one in variants(model, mode, other).items()}
            series, foreign = turns.take(make, options.rounds, options.turns, options.turn_s)
            ratio = report.Ratio(series[0], series[1], AT_LEAST)
            yield report.section(f"{TITLES[model]}: {mode}", series, [ratio], foreign)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", required=True, help="src of the other checkout")
    parser.add_argument("--models", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=4, help="of each job in a round")
    parser.add_argument("--turn_s", type=float, default=2.0)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
