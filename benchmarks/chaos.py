# SPDX-License-Identifier: Apache-2.0
"""Jobs with killed processes, simulated schedules, damaged frames and long runs.

It runs the programs of `tests.chaos` and keeps their last lines; each fails if it finds a fault.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from benchmarks import jobs, report

CLAIM = (
    "300 kills of servers and 300 of workers under load with durability='log': no acknowledged "
    "update is lost or doubled. 20 whole jobs killed at once in each mode: the same. 100,000 "
    "simulated schedules: no violation. 1,000,000 damaged frames: no crash, no hang, bounded "
    "memory. 30 minutes of training with kills: the memory of every process that lives on stays "
    "within 5 %, no descriptor or thread is leaked."
)
MODES = ("sync", "async", "ssp", "geo")


def programs(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """The commands, by the title of their section, the longest first."""

    def command(program: str, *flags: object) -> list[str]:
        return [f"tests.chaos.{program}", *map(str, flags), "--seed", str(options.seed)]

    few = options.quick
    yield "A long run", command("soaking", "--minutes", 0.2 if few else options.minutes)
    # from outside and from inside, in each mode
    each = 1 if few else options.kills // (2 * len(MODES))
    for kind in ("server", "worker"):
        yield f"Kills of {kind}s", command("killing", "--kinds", kind, "--kills", each)
    yield "Kills amid other harm", command("harming", "--kills", 1 if few else options.harmed)
    rounds = 1 if few else options.rounds
    yield "Whole jobs killed at once", command("whole", "--mode", *MODES, "--rounds", rounds)
    schedules = 100 if few else options.schedules
    yield "Simulated schedules", command("simulation", "--schedules", schedules, "--jobs", 2)
    yield "Damaged frames", command("fuzzing", "--frames", 1000 if few else options.frames)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all commands, or the named ones, and write the result page."""
    parser = report.parser(__doc__, rounds=20)
    add = parser.add_argument
    add("--kills", type=int, default=304, help="of either kind of process")
    add("--harmed", type=int, default=6, help="kills amid other harm, in each mode")
    add("--schedules", type=int, default=100_000)
    add("--frames", type=int, default=1_000_000)
    add("--minutes", type=float, default=30.0)
    add("--seed", type=int, default=1)
    add("--only", nargs="+", metavar="PROGRAM", help="killing, simulation, ...")
    options = parser.parse_args(argv)
    chosen = [
        _section(title, command)
        for title, command in programs(options)
        if options.only is None or command[0].rpartition(".")[2] in options.only
    ]
    report.page("chaos", CLAIM, (text for text, _ in chosen), options.quick)
    return max((code for _, code in chosen), default=0)


def _section(title: str, command: list[str]) -> tuple[str, int]:
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=jobs.ROOT,
        env=jobs.environment({"PYTHONUNBUFFERED": "1"}),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    minutes = (time.monotonic() - began) / 60
    verdict = "no fault was found" if ran.returncode == 0 else f"FAULT, exit code {ran.returncode}"
    text = f"## {title}\n\n`python -m {' '.join(command)}`: {verdict}, {minutes:.0f} minutes."
    return f"{text}\n\n```text\n{ran.stdout.rstrip()}\n```", ran.returncode


if __name__ == "__main__":
    sys.exit(main())
