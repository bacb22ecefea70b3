# SPDX-License-Identifier: Apache-2.0
"""Parameter servers on two cores against plain torch on one: wide & deep, and word2vec.

One server and two workers share two cores; plain torch (`nn.EmbeddingBag(sparse=True)`) has one
core to itself and no server to talk to. Queues are drained before the clock stops.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

from benchmarks import harness, jobs, machine, report
from benchmarks.ps_jobs import (
    STEPS,
    WARMUP,
    Bar,
    Make,
    Ours,
    add_usual_options,
    one_process,
    section,
)
from benchmarks.ps_models import TITLES

CLAIM = (
    "One server and two workers on two cores train more examples per second than plain one-process "
    "torch on one core, which sends nothing anywhere: wide & deep 1.25 times in sync, 1.4 in "
    "async, 1.6 in geo; word2vec as many in async, 1.5 times in geo. Rows are pulled ahead, or the "
    "server is in the same process: at least 0.9 times. A job's examples per CPU second are at "
    "least 0.85 times those of our own one process. All queues are drained inside the timed part."
)
TORCH, ALONE, AHEAD = "torch, one core", "one process", "sync, 1 worker, look-ahead"
MODES = ("sync", "async", "geo")
AT_LEAST = {
    "wide_deep": {"sync": 1.25, "async": 1.4, "geo": 1.6},
    "word2vec": {"async": 1.0, "geo": 1.5},
}
NEAR, THRIFT = 0.9, 0.85


def variants(model: str, steps: int) -> dict[str, Make]:
    """What makes a fresh job of each."""
    made: dict[str, Make] = {
        TORCH: functools.partial(one_process, TORCH, "torch", model, steps),
        ALONE: functools.partial(one_process, ALONE, "fleetlight", model, steps),
        AHEAD: Ours(
            AHEAD, model, "sync", steps, workers=1, lookahead=True, own_core=machine.cores() > 1
        ).job,
    }
    return made | {mode: Ours(mode, model, mode, steps).job for mode in MODES}


def bars(model: str) -> list[Bar]:
    """What is compared, and the least it may be."""
    speeds = [Bar(mode, TORCH, AT_LEAST[model].get(mode)) for mode in MODES]
    near = [Bar(ALONE, TORCH, NEAR), Bar(AHEAD, TORCH, NEAR)]
    return speeds + near + [Bar(mode, ALONE, THRIFT, "thrift") for mode in MODES]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both models and write the result page."""
    options = _parse(argv)
    sections = []
    for model in options.models:
        sections.append(_measure(model, options))
        print(sections[-1], end="\n\n", flush=True)
    if options.write:
        path = report.write("ps_modes", CLAIM, sections)
        print(f"written: {path.relative_to(jobs.ROOT)}")
    return 0


def _measure(model: str, options: argparse.Namespace) -> str:
    steps = options.steps or STEPS[model]
    make = variants(model, steps)
    if options.only:
        make = {name: of for name, of in make.items() if name in options.only}
    if options.prime:
        # kernels are compiled once, and then come from files
        for name in make:
            jobs.run(variants(model, WARMUP)[name]())
    runs = harness.rounds(make, options.rounds, options.idle_s, attempts=2)
    return section(TITLES[model], runs, bars(model), harness.foreign(runs))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=sorted(TITLES), default=list(TITLES))
    parser.add_argument("--steps", type=int, help="timed steps of each worker")
    every = (TORCH, ALONE, AHEAD, *MODES)
    parser.add_argument("--only", nargs="+", choices=every, help="these variants only")
    add_usual_options(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
