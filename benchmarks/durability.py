# SPDX-License-Identifier: Apache-2.0
"""The cost of durability and of encryption: wide & deep with one server.

The job runs without durability, with snapshots, with a log, and encrypted; all of them
take turns of a few seconds. The encrypted job sends rows and gradients through TCP, as between
hosts, so a job that does so without TLS is its counterpart. Batches come from a loader and rows are
prefetched, so that workers log their pushes as well.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence

from benchmarks import interleave, report
from benchmarks.ps import ENDLESS, Ours
from fleetlight.security import certificates

CLAIM = (
    "Wide & deep, one server and two workers: with durability='snapshot' at least 0.97 of the "
    "examples per second of durability='none', with 'log' 0.85; with TLS 0.9 of those of the same "
    "job through plain TCP. A step is one of one worker, 512 examples. What a snapshot costs while "
    "it is taken is told by the page of recovery; with 'log' the log is cut by snapshots as it "
    "grows, which is in the results."
)
#: {variant: its flags}
VARIANTS = {
    "none": [],
    "snapshot": ["--durability", "snapshot"],
    "log": ["--durability", "log"],
    "none, TCP": ["--no_shared_memory"],
    "none, TLS": ["--no_shared_memory", "--ssl"],
}
#: {variant: (the variant it is compared with, the ratio of steps per second)}
AT_LEAST = {"snapshot": ("none", 0.97), "log": ("none", 0.85), "none, TLS": ("none, TCP", 0.9)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    parser = report.parser(__doc__, rounds=8)
    add = parser.add_argument
    add("--modes", nargs="+", choices=("sync", "async"), default=["sync", "async"])
    add("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="these variants")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as ssl:
        certificates.make(ssl)
        return report.page("durability", CLAIM, _sections(options, ssl), options.quick)


def _sections(options: argparse.Namespace, ssl: str) -> Iterator[str]:
    for mode in options.modes:
        make = {}
        for name in options.only:
            flags = [*VARIANTS[name], *([ssl] if "--ssl" in VARIANTS[name] else [])]
            flags += ["--lookahead", "--count"]
            make[name] = Ours(name, "wide_deep", mode, ENDLESS, flags=flags).job
        much = (1, 1, 3.0) if options.quick else (options.rounds, 4, 2.5)
        rounds = interleave.run_paused(make, *much)
        by = {one.name: one for one in interleave.series([rounds])}
        ratios = [
            report.Ratio(by[name], by[base], least)
            for name, (base, least) in AT_LEAST.items()
            if name in by and base in by
        ]
        yield report.section(mode, [*by.values()], ratios, interleave.foreign([rounds]))


if __name__ == "__main__":
    sys.exit(main())
