# SPDX-License-Identifier: Apache-2.0
"""What it costs that nothing is lost, and that nobody listens: wide & deep with one server.

The same job with durability off, with snapshots, with a log, and encrypted, by turns. Batches come
from a loader and rows are pulled ahead, so that workers write down what they push as well.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence

from benchmarks import harness, jobs, report
from benchmarks.ps_jobs import WARMUP, Bar, Ours, add_usual_options, section
from fleetlight.security import certificates

CLAIM = (
    "Wide & deep, one server and two workers: with durability='snapshot' at least 0.97 of the "
    "examples per second of durability='none', with 'log' 0.85, with TLS 0.85. Snapshots are "
    "taken every few seconds here, every five minutes by default."
)
NONE, SNAPSHOT, LOG, TLS = "none", "snapshot", "log", "none, TLS"
AT_LEAST = {SNAPSHOT: 0.97, LOG: 0.85, TLS: 0.85}
MODEL = "wide_deep"


def variants(mode: str, steps: int, snapshot_s: float, ssl: str) -> dict[str, Ours]:
    """By name."""

    def one(name: str, durability: str = "none", ssl: str = "") -> Ours:
        return Ours(
            name,
            MODEL,
            mode,
            steps,
            lookahead=True,
            durability=durability,
            snapshot_s=snapshot_s,
            ssl=ssl,
        )

    made = [one(NONE), one(SNAPSHOT, "snapshot"), one(LOG, "log"), one(TLS, ssl=ssl)]
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
        make = variants(mode, options.steps, options.snapshot_s, ssl)
        if options.prime:
            jobs.run(variants(mode, WARMUP, options.snapshot_s, ssl)[NONE].job())
        runs = harness.rounds(
            {name: of.job for name, of in make.items()}, options.rounds, options.idle_s
        )
        bars = [Bar(name, NONE, least) for name, least in AT_LEAST.items()]
        thrift = [Bar(name, NONE, None, "thrift") for name in AT_LEAST]
        title = f"{mode}, a snapshot every {options.snapshot_s:g} s"
        yield section(title, runs, bars + thrift, harness.foreign(runs))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600, help="timed steps of each worker")
    parser.add_argument("--modes", nargs="+", choices=("sync", "async"), default=["sync", "async"])
    parser.add_argument("--snapshot_s", type=float, default=5.0)
    add_usual_options(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
