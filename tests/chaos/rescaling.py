# SPDX-License-Identifier: Apache-2.0
"""Stops a job on a real engine by SIGTERM, again and again, and resumes it on other counts.

python -m tests.chaos.rescaling --engine slurm --stops 20 --seed 1
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.killing import ChaosError
from tests.engines import records
from tests.engines.running import ENGINES, JobRequest, RunningJob, harness, started

#: servers and workers
COUNTS = ((2, 2), (1, 3), (3, 1), (1, 1), (2, 3), (3, 2))
#: how long a job trains before the next stop
SPREAD_S = 1.0


def stopped(engine: str, folder: Path, stops: int, seed: int) -> str:
    """Run a job and stop it so often; a line of results. Raises if a record is lost or doubled."""
    chance, name = random.Random(f"{seed} {engine}"), f"{engine}, seed {seed}"
    request = JobRequest(
        script="tests/engines/patient.py",
        arguments=(".",),
        later_starts=stops * max(map(sum, COUNTS)),
        saves=True,
    )
    with started(engine, folder, request) as job:
        try:
            counts = _stop(job, stops, chance)
            (job.folder / "enough").touch()
            job.end()
        except (AssertionError, TimeoutError) as error:
            raise ChaosError(f"{name}: {error}\n{job.output()}") from error
        workers = request.workers if not counts else counts[-1][1]
        totals = {(job.folder / f"done.{n}").read_text() for n in range(workers)}
        lost, doubled = records.lost_and_doubled(job.folder)
        epochs = len(records.trained(job.folder))
    if lost or doubled or len(totals) != 1:
        raise ChaosError(f"{name}: {lost} lost, {doubled} doubled; workers end with {totals}")
    return (
        f"{name}: {stops} stops, each resumed on other counts; {epochs} epochs of "
        f"{records.RECORDS} records: 0 lost, 0 doubled"
    )


def _stop(job: RunningJob, stops: int, chance: random.Random) -> list[tuple[int, int]]:
    """Stop and resume so often; the counts."""
    counts = [COUNTS[0]]
    for number in range(stops):
        before = records.steps(job.folder)
        job.wait_until(lambda: records.steps(job.folder) > before, "the job trains")  # noqa: B023
        time.sleep(chance.uniform(0, SPREAD_S))
        counts.append(chance.choice([other for other in COUNTS if other != counts[-1]]))
        job.rescale(*counts[-1])
        print(f"{number}: resumed on {counts[-1]}", file=sys.stderr, flush=True)
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Stop as often as requested; returns 1 if a count was wrong, 2 if the engine is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if (why := harness(options.engine).obstacle()) is not None:
        print(f"no {options.engine} here: {why}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(stopped(options.engine, Path(folder), options.stops, options.seed), flush=True)
        except ChaosError as error:
            print(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
