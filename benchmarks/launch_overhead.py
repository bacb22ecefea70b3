# SPDX-License-Identifier: Apache-2.0
"""The overhead of `fleetrun`: a job with it against the same processes by hand, and its help.

The wall time is from the first start to the last exit, so it includes finding ports, writing logs,
detecting the end and the closing line.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import interleave, jobs, report

CLAIM = (
    "`fleetrun` adds less than 0.5 s to a job started by hand, and `fleetrun --help` takes less "
    "than 0.15 s of CPU and does not import torch."
)
OVERHEAD_S = 0.5
HELP_CPU_S = 0.15
#: joins the others if requested, and prints one line
PROGRAM = """
import json, os, sys
if "--torch" in sys.argv:
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
print("RESULT " + json.dumps({"rank": int(os.environ["RANK"])}), flush=True)
"""
HEAVY = ("torch", "numpy", "numba", "rich")


def by_hand(program: str, flags: Sequence[str]) -> jobs.Job:
    """Two processes started at once, with torchrun's variables."""
    return jobs.Job("by hand", jobs.workers([sys.executable, program, *flags]))


def fleetrun(program: str, flags: Sequence[str]) -> jobs.Job:
    """The same two processes, started by the launcher."""
    argv = [*jobs.launcher(), "--nproc_per_node", "2", program, *flags]
    return jobs.Job("fleetrun", [jobs.Command(argv)])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result page."""
    options = interleave.parser(__doc__, rounds=15).parse_args(argv)
    rounds = 1 if options.quick else options.rounds
    rows, foreign = [], []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "launched.py")
        program.write_text(PROGRAM)
        for title, flags in (("nothing", []), ("import torch, one all_reduce", ["--torch"])):
            make = {
                "by hand": functools.partial(by_hand, str(program), flags),
                "fleetrun": functools.partial(fleetrun, str(program), flags),
            }
            runs = interleave.run_jobs(make, rounds, options.idle_s)
            rows.append((title, *_row(runs)))
            foreign += interleave.job_foreign(runs)
    head = ("processes do", "by hand, s", "fleetrun, s", "difference, s", f"below {OVERHEAD_S} s")
    launch = f"{report.table(head, rows)}\n\n{report.foreign_line(foreign)}"
    sections = [
        f"## Starting and ending 2 processes, {rounds} rounds\n\n{launch}",
        f"## fleetrun --help\n\n{_help(rounds)}",
    ]
    return report.page("launch_overhead", CLAIM, sections, options.quick)


def _row(runs: dict[str, list[jobs.Run]]) -> tuple[str, str, str, str]:
    hand, ours = ([run.wall_s for run in of] for of in runs.values())
    difference = report.Spread.of(b - a for a, b in zip(hand, ours, strict=True))
    verdict = _met(difference.median < OVERHEAD_S)
    return str(report.Spread.of(hand)), str(report.Spread.of(ours)), str(difference), verdict


def _help(rounds: int) -> str:
    """CPU seconds of `fleetrun --help` and of an empty Python, and its imports."""
    help_cpu = report.Spread.of(_cpu_s([*jobs.launcher(), "--help"]) for _ in range(rounds))
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
    before = jobs.children_cpu_s()
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return jobs.children_cpu_s() - before


def _imported() -> set[str]:
    """The top-level packages that `fleetrun --help` imports, from Python's own import log."""
    argv = [sys.executable, "-X", "importtime", "-m", "fleetlight.launch", "--help"]
    told = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stderr
    names = (line.rpartition("|")[2].strip() for line in told.splitlines())
    return {name.partition(".")[0] for name in names}


if __name__ == "__main__":
    sys.exit(main())
