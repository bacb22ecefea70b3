# SPDX-License-Identifier: Apache-2.0
"""The time from `fleetrun` to the first step: 2 servers and 2 workers, wide & deep in sync mode.

`--other` is the folder `src` of a checkout of the version before; its jobs take turns with this
version's. CPU seconds are those of fleetrun and all processes that it starts, from start to exit.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import jobs, machine, report
from benchmarks.launch_overhead import launcher

CLAIM = (
    "From `fleetrun` to the first step of wide & deep, 2 servers and 2 workers, this version takes "
    "at most half the time of the version before, and half the CPU seconds."
)
THIS, OTHER = "this version", "the version before"
AT_LEAST = 2.0
PROGRAM = str(Path(__file__).parent / "ps_train.py")
#: the result of a worker comes after a barrier, a few milliseconds after its step
_OPTIONS = (
    *("--system", "fleetlight", "--model", "wide_deep"),
    *("--mode", "sync", "--steps", "1", "--warmup", "0"),
)
_SIZE = ("--server_num", "2", "--worker_num", "2")


@dataclasses.dataclass(frozen=True)
class Start:
    """One job: when its last worker had made a step, and what the job cost."""

    first_step_s: float
    cpu_s: float
    foreign: float | None


def start(source: str, flags: Sequence[str] = ()) -> Start:
    """Start a job of one step with the fleetlight in `source`."""
    # compiled modules are read and written, as in an installed package
    own = {"PYTHONPATH": os.pathsep.join([source, str(jobs.ROOT)]), "PYTHONDONTWRITEBYTECODE": ""}
    command = jobs.Command([*launcher(), *flags, *_SIZE, PROGRAM, *_OPTIONS], own)
    before = time.time()
    run = jobs.run(jobs.Job("first step", [command]))
    ended = max(float(result["ended_at"]) for result in run.results)
    return Start(ended - before, run.cpu_s, run.foreign)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    options = _parse(argv)
    sources = {THIS: str(jobs.ROOT / "src"), **({OTHER: options.other} if options.other else {})}
    starts = _rounds(sources, options)
    report.page("first_step", CLAIM, [_section(starts)], keep=options.write)
    return 0


def _rounds(sources: Mapping[str, str], options: argparse.Namespace) -> dict[str, list[Start]]:
    """One job of each version in each round; the first ones compile, and are not counted."""
    for source in sources.values():
        start(source)
    starts: dict[str, list[Start]] = {name: [] for name in sources}
    for number in range(options.rounds):
        for name in sources if number % 2 == 0 else reversed(list(sources)):
            machine.wait_until_idle(options.idle_s)
            starts[name].append(one := start(sources[name]))
            print(f"{name}: {one.first_step_s:.2f} s, {one.cpu_s:.2f} CPU s", flush=True)
    return starts


def _section(starts: Mapping[str, Sequence[Start]]) -> str:
    head = ("version", "seconds to the first step", "CPU seconds of the job")
    rows = [
        (
            name,
            str(report.Spread.of(one.first_step_s for one in of)),
            str(report.Spread.of(one.cpu_s for one in of)),
        )
        for name, of in starts.items()
    ]
    parts = [report.table(head, rows)]
    if OTHER in starts:
        ratios = [_ratio(starts, "first_step_s"), _ratio(starts, "cpu_s")]
        compared = [
            (what, str(ratio.spread), ratio.verdict)
            for what, ratio in zip(("seconds", "CPU seconds"), ratios, strict=True)
        ]
        head = (f"{OTHER} / {THIS}", "median (min..max)", "at least")
        parts.append(report.table(head, compared))
    parts.append(report.foreign_line([one.foreign for of in starts.values() for one in of]))
    return "\n\n".join(parts)


def _ratio(starts: Mapping[str, Sequence[Start]], field: str) -> report.Ratio:
    over, under = (
        report.Series(name, [getattr(one, field) for one in starts[name]], ())
        for name in (OTHER, THIS)
    )
    return report.Ratio(over, under, AT_LEAST)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", help="src of the other checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--idle_s", type=float, default=0.0, help="wait for an idle machine first")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
