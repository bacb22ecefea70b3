# SPDX-License-Identifier: Apache-2.0
"""Throughput through a SIGKILL of a server and one of a worker, beside a job without both.

Wide & deep in async mode, 2 workers and 2 servers, started by fleetrun. The job with kills has
durability='log'; the reference has none. Rates are from the moments at which steps end. The input
has a pace that leaves cores free, so that other programs of the machine do not change the line.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks import interleave, jobs, machine, report

CLAIM = (
    "Wide & deep in async mode, 2 workers and 2 servers, durability='log': training is back at "
    "0.9 of its examples per second within 5 s of a SIGKILL of a server, and of one of a worker. "
    "While a worker is away, the other one continues. The input gives each worker a fixed number "
    "of batches a second (512 examples each), less than it could train on; what is missed during "
    "a kill does not come later. The rate is back at the end of the first second with 0.9 of the "
    "mean of the 5 s before the kill; "
    "a later low counts in the lost training only."
)
PROGRAM = str(Path(__file__).parent / "kills_train.py")
BACK_S, BACK = 5.0, 0.9
#: the width of a bin, and how many of them smooth a rate that is called back
BIN_S, SMOOTH = 0.5, 2
SERVER, WORKER = "server 1", "worker 1"
Rates = Sequence[float]


@dataclasses.dataclass(frozen=True)
class Line:
    """One job: the examples per second of each worker in each bin, and when it was disturbed."""

    workers: Sequence[Rates]
    killed: dict[str, float]
    foreign: float | None

    @property
    def both(self) -> list[float]:
        """The examples per second of all workers."""
        return [sum(rates) for rates in zip(*self.workers, strict=True)]


@dataclasses.dataclass(frozen=True)
class Dip:
    """What a kill costs."""

    #: the rate before it
    before: float
    #: the lowest rate of a bin behind it, as a share of that before
    lowest: float
    #: seconds until the rate is back; infinite if it is never
    back_s: float
    #: the examples that were not trained on, as seconds of the rate before
    lost_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    parser = interleave.parser(__doc__, rounds=5)
    add = parser.add_argument
    add("--calm_s", type=float, default=8.0, help="before the first kill")
    add("--between_s", type=float, default=12.0, help="behind each kill")
    add("--per_s", type=float, default=16.0, help="batches of a worker")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.calm_s = 1, 3.0
    return report.page("kills", CLAIM, _sections(options), options.quick)


def _sections(options: argparse.Namespace) -> Iterator[str]:
    kills = ["--durability", "log", "--server_at", str(options.calm_s)]
    kills += ["--worker_at", str(options.calm_s + options.between_s)]
    kills += ["--end_at", str(end := options.calm_s + 2 * options.between_s)]
    calm = ["--durability", "none", "--end_at", str(end)]
    pace = ["--per_s", str(options.per_s)]
    killed: list[Line] = []
    reference: list[Line] = []
    for number in range(options.rounds):
        for lines, flags in ((killed, kills), (reference, calm)):
            machine.wait_until_idle(options.idle_s)
            lines.append(line := _line([*flags, *pace], end))
            print(f"round {number + 1}/{options.rounds}: {_shown(line, options)}", flush=True)
    yield costs(killed, reference, options.between_s)
    yield course(killed, reference, options.between_s)


def _line(flags: Sequence[str], end: float) -> Line:
    size = ["--server_num", "2", "--worker_num", "2", "--max_restarts", "2"]
    # compiled modules are read and written, as in an installed package
    own = {"PYTHONDONTWRITEBYTECODE": ""}
    command = jobs.Command([*jobs.launcher(), *size, PROGRAM, *flags], own)
    run = jobs.run(jobs.Job("kills", [command], results=1, deadline_s=300.0))
    [found] = run.results
    workers = [binned(times, end, found["samples"]) for times in found["times"]]
    return Line(workers, found["killed"], run.foreign)


def binned(times: Sequence[float], end: float, samples: int) -> list[float]:
    """The examples per second of a worker in each bin up to the end."""
    counts, _ = np.histogram(times, np.arange(round(end / BIN_S) + 1) * BIN_S)
    return [float(count) * samples / BIN_S for count in counts]


def dip(rates: Rates, at: float, until: float) -> Dip:
    """The dip behind a kill, in the bins up to `until`; the bin of the kill counts."""
    first, last = int(at / BIN_S), int(until / BIN_S)
    before = statistics.fmean(rates[max(0, first - round(BACK_S / BIN_S)) : first])
    before, behind = max(before, 1e-9), rates[first:last]
    if not behind:
        # a machine so busy that the kill came after the end
        return Dip(before, 0.0, float("inf"), until - at)
    means = [statistics.fmean(behind[n : n + SMOOTH]) for n in range(len(behind) - SMOOTH + 1)]
    low = [n for n, mean in enumerate(means) if mean < BACK * before]
    # what is low once more, long after, is noise of the machine
    gap = next((n for n in range(len(means)) if n >= (low or [0])[0] and n not in low), None)
    back_s = 0.0
    if low:
        back_s = float("inf") if gap is None else (first + gap + SMOOTH) * BIN_S - at
    lost_s = sum(before - rate for rate in behind) * BIN_S / before
    return Dip(before, min(behind) / before, back_s, lost_s)


def costs(killed: Sequence[Line], reference: Sequence[Line], between_s: float) -> str:
    """What each kill costs over the rounds."""
    rows: list[Sequence[str]] = []
    before: list[float] = []
    for name in (SERVER, WORKER):
        dips = [dip(line.both, at := line.killed[name], at + between_s) for line in killed]
        back = report.Spread.of(one.back_s for one in dips)
        rows.append(
            (
                f"SIGKILL of {name}",
                str(report.Spread.of(100 * one.lowest for one in dips)),
                str(back),
                report.at_most(back.median, BACK_S),
                str(report.Spread.of(one.lost_s for one in dips)),
            )
        )
        before = before or [one.before for one in dips]
    lowest = f"lowest {BIN_S:g} s, % of before"
    head = ("what", lowest, "s until 90 %", "at most", "lost, s of training")
    calm = [statistics.fmean(line.both) for line in reference]
    rates = [
        ("durability='log', before the kills", str(report.Spread.of(before))),
        ("durability='none', no kill", str(report.Spread.of(calm))),
    ]
    shares = [line.foreign for line in (*killed, *reference)]
    parts = [
        f"## What a kill costs, {len(killed)} rounds",
        report.table(head, rows),
        report.table(("job", "examples/s: median (min..max)"), rates),
        report.foreign_line(shares),
    ]
    return "\n\n".join(parts)


def course(killed: Sequence[Line], reference: Sequence[Line], between_s: float) -> str:
    """The rates of one round, the one in the middle by what its kills cost."""

    def lost_s(line: Line) -> float:
        return sum(dip(line.both, at, at + between_s).lost_s for at in line.killed.values())

    shown = sorted(range(len(killed)), key=lambda n: lost_s(killed[n]))[len(killed) // 2]
    line, calm = killed[shown], reference[shown]
    rates = zip(line.both, *line.workers, calm.both, strict=True)
    rows = [
        (f"{number * BIN_S:g}", *(f"{rate:,.0f}" for rate in found))
        for number, found in enumerate(rates)
    ]
    events = [(name, f"{at:.2f}") for name, at in line.killed.items()]
    head = ("s", "with kills", "- worker 0", "- worker 1", "no durability, no kill")
    parts = [
        "## The kills of the round in the middle",
        report.table(("SIGKILL of", "at s"), events),
        "## Examples per second in the round in the middle",
        report.table(head, rows),
    ]
    return "\n\n".join(parts)


def _shown(line: Line, options: argparse.Namespace) -> str:
    if not line.killed:
        return f"no kill, {statistics.fmean(line.both):,.0f} examples/s"
    found = [dip(line.both, at, at + options.between_s) for at in line.killed.values()]
    return "; ".join(f"back after {one.back_s:.2f} s, lost {one.lost_s:.2f} s" for one in found)


if __name__ == "__main__":
    sys.exit(main())
