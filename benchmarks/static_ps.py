# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: a static program against the eager loop, in every mode.

One server and two workers, and one process with the server in it; the kinds in turns. A program
makes one step a call, or several.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence

from benchmarks import harness, jobs, report
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
    "With parameter servers, a static program trains at least as many examples per second as the "
    "eager loop: wide & deep in sync, async and geo, and in one process."
)
MODES = ("sync", "async", "geo")
ALONE = "one process"
KINDS = {"eager": "fleetlight", "static": "static"}
AT_LEAST = 1.0
#: with so many steps a call: the least in examples per CPU second
STEPS_PER_CALL, SEVERAL_AT_LEAST = 10, 1.3
SEVERAL = f"static, {STEPS_PER_CALL} steps a call"
#: of `--quick`: rounds and timed steps, which only say that it runs
QUICK = (1, 40)


def variants(model: str, steps: int) -> dict[str, Make]:
    """What makes a fresh job of each."""
    made: dict[str, Make] = {}
    for kind, system in KINDS.items():
        name = f"{ALONE}, {kind}"
        made[name] = functools.partial(one_process, name, system, model, steps)
        for mode in MODES:
            name = f"{mode}, {kind}"
            made[name] = Ours(name, model, mode, steps, system=system).job
    for mode in MODES:
        name = f"{mode}, {SEVERAL}"
        several = Ours(name, model, mode, steps, system="static", steps_per_call=STEPS_PER_CALL)
        made[name] = several.job
    return made


def bars(model: str) -> list[Bar]:
    """What is compared, and the least it may be; for word2vec nothing was promised."""
    least = AT_LEAST if model == "wide_deep" else None
    pairs = [(f"{mode}, static", f"{mode}, eager") for mode in (*MODES, ALONE)]
    bars = [Bar(*pair, least) for pair in pairs] + [Bar(*pair, None, "thrift") for pair in pairs]
    for mode in MODES:
        several = f"{mode}, {SEVERAL}"
        bars.append(Bar(several, f"{mode}, eager", SEVERAL_AT_LEAST, "thrift"))
        bars.append(Bar(several, f"{mode}, static", None, "thrift"))
    return bars


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the result page."""
    options = _parse(argv)
    sections = [_measure(model, options) for model in options.models]
    print("\n\n".join(sections), flush=True)
    if options.write and not options.quick:
        path = report.write("static_ps", CLAIM, sections)
        print(f"written: {path.relative_to(jobs.ROOT)}")
    return 0


def _measure(model: str, options: argparse.Namespace) -> str:
    rounds, steps = QUICK if options.quick else (options.rounds, options.steps or STEPS[model])
    make = variants(model, steps)
    if options.prime and not options.quick:
        # kernels are compiled once, and then come from files
        for one in variants(model, WARMUP).values():
            jobs.run(one())
    runs = harness.rounds(make, rounds, options.idle_s, attempts=2)
    return section(TITLES[model], runs, bars(model), harness.foreign(runs))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="+", choices=sorted(TITLES), default=["wide_deep"])
    parser.add_argument("--steps", type=int, help="timed steps of each worker")
    parser.add_argument("--quick", action="store_true", help="one short round, no page")
    add_usual_options(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
