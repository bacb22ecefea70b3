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
from concurrent import futures

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
    """The commands, by the title of their section."""
    # the longest commands first
    flags = ["--minutes", str(options.minutes), "--seed", str(options.seed)]
    yield "A long run", ["tests.chaos.soaking", *flags]
    # from outside and from inside, in each mode
    each = str(options.kills // (2 * len(MODES)))
    for kind in ("server", "worker"):
        flags = ["--kinds", kind, "--kills", each, "--seed", str(options.seed)]
        yield f"Kills of {kind}s", ["tests.chaos.killing", *flags]
    flags = ["--kills", str(options.harmed), "--seed", str(options.seed)]
    yield "Kills amid other harm", ["tests.chaos.harming", *flags]
    flags = ["--mode", *MODES, "--rounds", str(options.rounds), "--seed", str(options.seed)]
    yield "Whole jobs killed at once", ["tests.chaos.whole", *flags]
    flags = ["--schedules", str(options.schedules), "--seed", str(options.seed), "--jobs", "2"]
    yield "Simulated schedules", ["tests.chaos.simulation", *flags]
    flags = ["--frames", str(options.frames), "--seed", str(options.seed)]
    yield "Damaged frames", ["tests.chaos.fuzzing", *flags]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all commands, or the named ones, and write the result page."""
    options = _parse(argv)
    chosen = [
        (title, command)
        for title, command in programs(options)
        if options.only is None or command[0].rpartition(".")[2] in options.only
    ]
    with futures.ThreadPoolExecutor(options.at_once) as pool:
        sections = list(pool.map(lambda one: _section(*one), chosen))
    if options.write:
        path = report.write("chaos", CLAIM, sections)
        print(f"written: {path.relative_to(jobs.ROOT)}")
    return 0


def _section(title: str, command: list[str]) -> str:
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
    lines = f"```text\n{ran.stdout.rstrip()}\n```"
    verdict = "no fault was found" if ran.returncode == 0 else f"FAULT, exit code {ran.returncode}"
    text = f"## {title}\n\n`python -m {' '.join(command)}`: {verdict}, {minutes:.0f} minutes."
    print(f"{text}\n\n{lines}\n", flush=True)
    return f"{text}\n\n{lines}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=304, help="of either kind of process")
    parser.add_argument("--harmed", type=int, default=6, help="kills amid other harm, in each mode")
    parser.add_argument("--rounds", type=int, default=20, help="whole jobs in each mode")
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at_once", type=int, default=1, help="programs that run side by side")
    parser.add_argument("--only", nargs="+", metavar="PROGRAM", help="killing, simulation, ...")
    parser.add_argument("--write", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
