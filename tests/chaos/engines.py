# SPDX-License-Identifier: Apache-2.0
"""Kills processes and nodes of a job that counts on a real engine, and reports the result.

python -m tests.chaos.engines --engine slurm --kills 50 --seed 1
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from tests.chaos.incarnations import MEMBERS, Name, Return, all_at_work
from tests.chaos.killing import MODES, SPREAD_S, ChaosError, end_of, outcome_of
from tests.engines.running import ENGINES, JobRequest, RunningJob, harness, started

#: the job trains again within this time after the engine has started a process
BAR_S = 5.0
MODULES = ("tests/chaos/harms.py", "tests/chaos/self_kill.py")


def measured(engine: str, folder: Path, mode: str, kills: int, nodes: int, seed: int) -> str:
    """Run a job and kill so often, with losses of nodes among the kills; a line of results."""
    name = f"{engine}, {mode}, seed {seed}"
    request = JobRequest(
        script="tests/chaos/counting.py",
        arguments=("--mode", mode, "--seed", str(seed)),
        modules=MODULES,
        restarts=kills,
        later_starts=kills,
    )
    with started(engine, folder, request) as job:
        try:
            job.wait_until(lambda: all_at_work(job.folder), "all processes are at work")
            seconds = _kill(job, kills, nodes, random.Random(f"{seed} {engine}"))
            (job.folder / "enough").touch()
            job.end()
        except (AssertionError, TimeoutError) as error:
            (folder / "output").write_text(job.output())
            raise ChaosError(f"{name}: {error}\n{end_of(folder)}") from error
        (folder / "output").write_text(job.output())
    outcome = outcome_of(folder, name, [], [])
    counted = f"{name}: {kills} kills, {outcome.counted} rows counted: 0 lost, 0 doubled"
    return "; ".join([counted, *(_spread(what, of) for what, of in seconds.items() if of)])


def _kill(job: RunningJob, kills: int, nodes: int, chance: random.Random) -> dict[str, list[float]]:
    """How long training took to continue after each start by the engine."""
    seconds: dict[str, list[float]] = {"a process": [], "a node": []}
    # not first, so that each run kills processes in the first incarnations
    whole = set(chance.sample(range(kills // 4, kills), nodes))
    for number in range(kills):
        time.sleep(chance.uniform(0, SPREAD_S))
        victim, again = chance.choice(MEMBERS), Return(job.folder, time.time())
        victims: Collection[Name] = [victim]
        if number in whole:
            victims = job.lose_node_of(victim)
        else:
            job.kill(victim)
        job.wait_until(lambda: again.is_over(victims), f"training continues without {victims}")  # noqa: B023
        kind = "a node" if number in whole else "a process"
        seconds[kind].append(again.seconds)
        print(f"{number}: {kind} of {victim}: {again.seconds:.2f} s", file=sys.stderr, flush=True)
    return seconds


def _spread(what: str, seconds: Sequence[float]) -> str:
    late = sum(one > BAR_S for one in seconds)
    return (
        f"{len(seconds)} x {what}: training continued after {statistics.median(seconds):.2f} s in "
        f"the middle, {max(seconds):.2f} s at most, {late} later than {BAR_S:g} s"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Kill as often as requested; returns 1 if a count was wrong, 2 if the engine is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--mode", choices=MODES, default="sync")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--nodes", type=int, default=3, help="kills that are losses of a node")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if (why := harness(options.engine).obstacle()) is not None:
        print(f"no {options.engine} here: {why}")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        words = (options.mode, options.kills, options.nodes, options.seed)
        try:
            print(measured(options.engine, Path(folder), *words), flush=True)
        except ChaosError as error:
            print(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
