# SPDX-License-Identifier: Apache-2.0
"""This checkout beside another one: parameter servers in every mode, jobs that take turns.

`--other` is the folder `src` of a checkout of the other version; one interpreter runs both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import interleave, report
from benchmarks.ps import ENDLESS, TITLES, Ours

CLAIM = (
    "Wide & deep and word2vec, one server and two workers: this version makes at least 0.97 of the "
    "steps per second of the version before, in every mode."
)
AT_LEAST = 0.97
#: the mode of the job, and its flags
MODES: dict[str, tuple[str, list[str]]] = {
    "sync": ("sync", []),
    "async": ("async", []),
    "async, staleness 4": ("async", ["--staleness", "4"]),
    "geo": ("geo", []),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    parser = report.parser(__doc__, rounds=5)
    add = parser.add_argument
    add("--other", required=True, help="src of the other checkout")
    add("--models", nargs="+", choices=list(TITLES), default=list(TITLES))
    add("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    options = parser.parse_args(argv)
    if not Path(options.other, "fleetlight").is_dir():
        parser.error(f"--other: no fleetlight in {options.other}; give the src of a checkout")
    return report.page("two_versions", CLAIM, _sections(options), options.quick)


def _sections(options: argparse.Namespace) -> Iterator[str]:
    sources = {"this version": "", "the version before": str(Path(options.other).absolute())}
    for model in options.models:
        for mode in options.modes:
            kind, flags = MODES[mode]
            make = {
                name: Ours(name, model, kind, ENDLESS, flags=[*flags, "--count"], source=of).job
                for name, of in sources.items()
            }
            much = (1, 1, 3.0) if options.quick else (options.rounds, 4, 2.0)
            rounds = interleave.run_paused(make, *much)
            series = interleave.series([rounds])
            ratio = report.Ratio(series[0], series[1], AT_LEAST)
            foreign = interleave.foreign([rounds])
            yield report.section(f"{TITLES[model]}: {mode}", series, [ratio], foreign)


if __name__ == "__main__":
    sys.exit(main())
