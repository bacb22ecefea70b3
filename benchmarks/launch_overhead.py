# SPDX-License-Identifier: Apache-2.0
"""The overhead of `fleetrun`: a job with it against the same processes by hand, and its help.

The wall time is from the first start to the last exit, so it includes finding ports, writing logs,
detecting the end and the closing line.
"""

from __future__ import annotations

import argparse
import functools
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness, jobs, report

CLAIM = (
    "`fleetrun` adds less than 0.5 s to a job started by hand, and `fleetrun --help` takes less "
    "than 0.15 s of CPU and does not import torch."
)
OVERHEAD_S = 0.5
HELP_CPU_S = 0.15
PROGRAM = str(Path(__file__).parent / "launched.py")
HEAVY = ("torch", "numpy", "numba", "rich")


def by_hand(flags: Sequence[str]) -> jobs.Job:
    """Two processes started at once, with torchrun's variables."""
    return jobs.Job("by hand", jobs.workers([sys.executable, PROGRAM, *flags]))


def fleetrun(flags: Sequence[str]) -> jobs.Job:
    """The same two processes, started by the launcher."""
    argv = [*launcher(), "--nproc_per_node", "2", PROGRAM, *flags]
    return jobs.Job("fleetrun", [jobs.Command(argv)])


def launcher() -> list[str]:
    """The installed command, or the module if it is not installed."""
    command = Path(sys.executable).with_name("fleetrun")
    return [str(command)] if command.exists() else [sys.executable, "-m", "fleetlight.launch"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    options = _parse(argv)
    rows, foreign = [], []
    for title, flags in (("nothing", []), ("import torch, one all_reduce", ["--torch"])):
        make = {
            "by hand": functools.partial(by_hand, flags),
            "fleetrun": functools.partial(fleetrun, flags),
        }
        runs = harness.rounds(make, options.rounds, options.idle_s)
        rows.append((title, *_row(runs)))
        foreign += harness.foreign(runs)
    head = ("processes do", "by hand, s", "fleetrun, s", "difference, s", f"below {OVERHEAD_S} s")
    launch = f"{report.table(head, rows)}\n\n{report.foreign_line(foreign)}"
    sections = [
        f"## Starting and ending 2 processes, {options.rounds} rounds\n\n{launch}",
        f"## fleetrun --help\n\n{_help(options.rounds)}",
    ]
    path = report.write("launch_overhead", CLAIM, sections)
    print("\n\n".join([*sections, f"written: {path.relative_to(jobs.ROOT)}"]))
    return 0


def _row(runs: dict[str, list[jobs.Run]]) -> tuple[str, str, str, str]:
    hand, ours = ([run.wall_s for run in of] for of in runs.values())
    difference = report.Spread.of(b - a for a, b in zip(hand, ours, strict=True))
    verdict = _met(difference.median < OVERHEAD_S)
    return str(report.Spread.of(hand)), str(report.Spread.of(ours)), str(difference), verdict


def _help(rounds: int) -> str:
    """CPU seconds of `fleetrun --help` and of an empty Python, and its imports."""
    help_cpu = report.Spread.of(_cpu_s([*launcher(), "--help"]) for _ in range(rounds))
    bare_cpu = report.Spread.of(_cpu_s([sys.executable, "-c", ""]) for _ in range(rounds))
    loaded = _imported() & set(HEAVY)
    rows = [
        ("CPU s of `fleetrun --help`", str(help_cpu), _met(help_cpu.median < HELP_CPU_S)),
        ("CPU s of an empty Python", str(bare_cpu), "-"),
        (f"imports of {', '.join(HEAVY)}", ", ".join(sorted(loaded)) or "none", _met(not loaded)),
    ]
    return report.table(("what", "median (min..max)", f"below {HELP_CPU_S} s, none"), rows)


def _met(reached: bool) -> str:
    return "met" if reached else "missed"


def _cpu_s(argv: Sequence[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _imported() -> set[str]:
    """The top-level packages that `fleetrun --help` imports, from Python's own import log."""
    argv = [sys.executable, "-X", "importtime", "-m", "fleetlight.launch", "--help"]
    told = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stderr
    names = (line.rpartition("|")[2].strip() for line in told.splitlines())
    return {name.partition(".")[0] for name in names}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--idle_s", type=float, default=0.0, help="wait for an idle machine first")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
