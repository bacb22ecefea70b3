# SPDX-License-Identifier: Apache-2.0
"""The time from the start of the last process of a job to the first step of its last worker.

python -m tests.engines.first_step --engine slurm --rounds 5

An engine starts `fleetlight member` for each process; the other jobs start with fleetrun. Jobs of
both take turns on one machine, whose cores all of their processes share: compare jobs that have no
more processes than cores, unless the nodes of your engine are as crowded.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.engines import MODULES
from tests.chaos.incarnations import MEMBERS, Return
from tests.engines.running import ENGINES, JobRequest, RunningEngine, harness

#: an engine may take so many times as long as fleetrun
BAR = 1.2


class Start:
    """Starts jobs with so many servers, and as many workers."""

    def __init__(self, each: int) -> None:
        self.members = [name for name in MEMBERS if name[1] < each]
        self._request = JobRequest(
            script="tests/chaos/counting.py",
            arguments=("--mode", "sync"),
            modules=MODULES,
            servers=each,
            workers=each,
            nodes=len(self.members),
        )

    def first_step_s(self, engine: RunningEngine, folder: Path) -> float:
        """Start a job and end it."""
        began = time.time()
        job = engine.start(folder, self._request)
        started = Return(job.folder, began, self.members)
        job.wait_until(lambda: started.is_over(self.members), "the first step")
        (job.folder / "enough").touch()
        job.end()
        return started.seconds_after_last


def measured(name: str, folder: Path, rounds: int, each: int) -> dict[str, list[float]]:
    """The times of both; the first round compiles, and does not count."""
    seconds: dict[str, list[float]] = {name: [], "fleetrun": []}
    start = Start(each)
    starts = (rounds + 1) * len(start.members)
    with (
        harness(name).running(folder / "engine", starts) as engine,
        harness("fleetrun").running(folder / "fleetrun", starts) as fleetrun,
    ):
        engines = {name: engine, "fleetrun": fleetrun}
        for number in range(rounds + 1):
            for which in sorted(engines, reverse=bool(number % 2)):
                one = start.first_step_s(engines[which], folder / f"{which}.{number}")
                print(f"{number}: {which}: {one:.2f} s", file=sys.stderr, flush=True)
                if number:
                    seconds[which].append(one)
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns 2 if the engine is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each", type=int, choices=(1, 2), default=1, help="servers, and workers")
    options = parser.parse_args(argv)
    if (why := harness(options.engine).obstacle()) is not None:
        print(f"no {options.engine} here: {why}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        seconds = measured(options.engine, Path(folder), options.rounds, options.each)
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    spreads = [
        f"{name}: {statistics.median(of):.2f} s ({min(of):.2f}..{max(of):.2f})"
        for name, of in seconds.items()
    ]
    size = f"{options.each} + {options.each} processes, {options.rounds} rounds"
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
    print(f"first step, {size}: {'; '.join(spreads)}; ratio {ratio}, at most {BAR}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
