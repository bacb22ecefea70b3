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

from benchmarks import report, turns
from benchmarks.ps_jobs import Ours
from fleetlight.security import certificates

CLAIM = (
    "Wide & deep, one server and two workers: with durability='snapshot' at least 0.97 of the "
    "examples per second of durability='none', with 'log' 0.85; with TLS 0.9 of those of the same "
    "job through plain TCP. A step is one of one worker, 512 examples. What a snapshot costs while "
    "it is taken is told by the page of recovery; with 'log' the log is cut by snapshots as it "
    "grows, which is in the figures."
)
NONE, SNAPSHOT, LOG, TCP, TLS = "none", "snapshot", "log", "none, TCP", "none, TLS"
#: {variant: (the variant it is compared with, the ratio of steps per second)}
AT_LEAST = {SNAPSHOT: (NONE, 0.97), LOG: (NONE, 0.85), TLS: (TCP, 0.9)}
ALL = (NONE, SNAPSHOT, LOG, TCP, TLS)
#: longer than any run: the jobs end after the last turn
_ENDLESS = 10_000_000


def variants(mode: str, snapshot_s: float, ssl: str) -> dict[str, Ours]:
    """The variants, by name."""

    def one(name: str, durability: str = "none", ssl: str = "", shared_memory: bool = True) -> Ours:
        return Ours(
            name,
            "wide_deep",
            mode,
            _ENDLESS,
            lookahead=True,
            durability=durability,
            snapshot_s=snapshot_s,
            ssl=ssl,
            shared_memory=shared_memory,
            count=True,
        )

    made = [
        one(NONE),
        one(SNAPSHOT, "snapshot"),
        one(LOG, "log"),
        one(TCP, shared_memory=False),
        one(TLS, ssl=ssl, shared_memory=False),
    ]
    return {of.name: of for of in made}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    options = _parse(argv)
    with tempfile.TemporaryDirectory() as ssl:
        certificates.make(ssl)
        report.page("durability", CLAIM, _sections(options, ssl), keep=options.write)
    return 0


def _sections(options: argparse.Namespace, ssl: str) -> Iterator[str]:
    for mode in options.modes:
        found = variants(mode, options.snapshot_s, ssl)
        make = {name: found[name].job for name in found if name in options.only}
        series, foreign = turns.take(make, options.rounds, options.turns, options.turn_s)
        by = {one.name: one for one in series}
        ratios = [
            report.Ratio(by[name], by[base], least)
            for name, (base, least) in AT_LEAST.items()
            if name in by and base in by
        ]
        yield report.section(mode, series, ratios, foreign)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4, help="of each job in a round")
    parser.add_argument("--turn_s", type=float, default=2.5)
    parser.add_argument("--modes", nargs="+", choices=("sync", "async"), default=["sync", "async"])
    parser.add_argument("--only", nargs="+", choices=ALL, default=ALL, help="these variants")
    parser.add_argument("--snapshot_s", type=float, default=300.0)
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
