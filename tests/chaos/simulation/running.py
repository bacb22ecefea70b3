# SPDX-License-Identifier: Apache-2.0
"""Runs many schedules, and reports the first that failed."""

import argparse
import gc
import logging
import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tests.chaos.simulation.elastic.schedule import Elastic
from tests.chaos.simulation.forming import Formed
from tests.chaos.simulation.host import machinery
from tests.chaos.simulation.launcher import Launched
from tests.chaos.simulation.moving_servers import Moved
from tests.chaos.simulation.schedule import Served
from tests.chaos.simulation.world import World

#: the subjects of schedules, and how many of a hundred each has
KINDS: dict[str, tuple[Callable[[World], Any], int]] = {
    "served": (Served, 58),
    "launched": (Launched, 14),
    "formed": (Formed, 4),
    "moved": (Moved, 4),
    "elastic": (Elastic, 20),
}
_EVERY = [kind for kind, (_, share) in KINDS.items() for _ in range(share)]


class SimulationError(AssertionError):
    """A schedule failed; the text has its seed and its events."""


def simulate(
    seed: int, numbers: Iterable[int], kinds: Sequence[str] = tuple(KINDS)
) -> Counter[str]:
    """Run schedules of a seed, by their numbers; returns how many there were of each kind."""
    ran: Counter[str] = Counter()
    every = [kind for kind in _EVERY if kind in kinds]
    with machinery():
        for number in numbers:
            kind = every[number * 37 % len(every)]
            _run(seed, number, kind)
            ran[kind] += 1
    return ran


def _run(seed: int, number: int, kind: str) -> None:
    world = World(f"{seed} {number}")
    schedule = None
    try:
        schedule = KINDS[kind][0](world)
        schedule.run()
    except Exception as error:
        happened = "\n".join(f"{at:8.3f}  {who}: {what}" for at, who, what in world.happened)
        script = getattr(schedule, "script", "")
        raise SimulationError(
            f"schedule {number} of seed {seed} ({kind}) went wrong.\n{script}\n"
            f"What happened, up to the end:\n{happened}\n{type(error).__name__}: {error}\n"
            f"Once more: python -m tests.chaos.simulation --kinds {kind} --seed {seed} "
            f"--only {number}"
        ) from error


def _settle() -> None:
    """Spare a process that only simulates what costs time."""
    logging.disable(logging.INFO)
    gc.freeze()


def _job(seed: int, numbers: Sequence[int], kinds: Sequence[str], results: Any) -> None:
    _settle()
    try:
        results.put(simulate(seed, numbers, kinds))
    except SimulationError as error:
        results.put(str(error))
    except BaseException:
        # the parent process waits for a result
        results.put(traceback.format_exc())
        raise


def _all(seed: int, numbers: Sequence[int], kinds: Sequence[str], jobs: int) -> Counter[str]:
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    processes = [
        context.Process(target=_job, args=(seed, numbers[job::jobs], kinds, results), daemon=True)
        for job in range(jobs)
    ]
    for process in processes:
        process.start()
    ran: Counter[str] = Counter()
    for _ in processes:
        one = results.get()
        if isinstance(one, str):
            for process in processes:
                process.terminate()
            raise SimulationError(one)
        ran += one
    for process in processes:
        process.join()
    return ran


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate as requested; returns 1 where a schedule failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.simulation")
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first schedule")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=tuple(KINDS))
    parser.add_argument("--only", type=int, help="run just the schedule of this number")
    options = parser.parse_args(argv)
    began = time.monotonic()
    try:
        if options.only is not None:
            _settle()
            ran = simulate(options.seed, [options.only], options.kinds)
        else:
            numbers = range(options.first, options.first + options.schedules)
            ran = _all(options.seed, numbers, options.kinds, options.jobs)
    except SimulationError as error:
        print(error)
        return 1
    took_s = time.monotonic() - began
    kinds = ", ".join(f"{count} {kind}" for kind, count in ran.items())
    print(
        f"simulation, seed {options.seed}: {ran.total()} schedules ({kinds}) in {took_s:.0f} s, "
        f"{ran.total() / took_s:.0f} a second: 0 violations"
    )
    return 0
