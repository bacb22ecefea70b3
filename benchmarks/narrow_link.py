# SPDX-License-Identifier: Apache-2.0
"""Narrow rows on a slow network: async over a link of 20 Mbit/s.

Servers and workers run in the network namespaces of `geo_link`, which requires root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import harness, jobs, report
from benchmarks.geo_link import SIDES, link
from benchmarks.ps_jobs import WARMUP, Bar, Make, Ours, add_usual_options, section
from benchmarks.ps_models import TITLES

CLAIM = (
    "Where the link between workers and servers is the limit and rows are most of the bytes, bf16 "
    "trains at least 1.7 times and int8 at least 2.5 times as many examples per second as float32 "
    "in async mode: word2vec with 64 numbers a row, 2 servers and 2 workers, 20 Mbit/s between "
    "their network namespaces in each direction."
)
WIRES = ("fp32", "bf16", "fp16", "int8")
AT_LEAST = {("word2vec", "bf16"): 1.7, ("word2vec", "fp16"): 1.7, ("word2vec", "int8"): 2.5}


def variants(model: str, steps: int) -> dict[str, Make]:
    """Async with each form of rows."""
    around = tuple(["ip", "netns", "exec", space] for space, _ in SIDES)
    usual = {"servers": 2, "around": around, "host": SIDES[0][1], "lookahead": True}
    return {
        wire: Ours(wire, model, "async", steps, table_wire=wire, **usual).job  # type: ignore[arg-type]
        for wire in WIRES
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Shape the link, measure, write the result page."""
    options = _parse(argv)
    parts = []
    for model in options.models:
        if options.prime:
            # kernels are compiled once and then loaded from files
            for wire in WIRES:
                jobs.run(Ours("prime", model, "async", WARMUP, table_wire=wire).job())
        with link(options.mbit):
            make = variants(model, options.steps)
            runs = harness.rounds(make, options.rounds, options.idle_s, attempts=2)
        bars = [Bar(wire, "fp32", AT_LEAST.get((model, wire))) for wire in WIRES[1:]]
        title = f"{TITLES[model]}, {options.mbit:g} Mbit/s between 2 servers and 2 workers"
        parts.append(section(title, runs, bars, harness.foreign(runs)))
        print(parts[-1], end="\n\n", flush=True)
    if options.write:
        path = report.write("narrow_link", CLAIM, parts)
        print(f"written: {path.relative_to(jobs.ROOT)}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=TITLES, default=["word2vec"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mbit", type=float, default=20.0, help="of the link, in each direction")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of a worker")
    add_usual_options(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
