# SPDX-License-Identifier: Apache-2.0
"""Several variants trained in turn inside one group of processes.

Processes that run minutes apart differ by more than the effect to measure. Here the variants share
the processes and take turns of a few steps, so other load of the machine affects all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.machine import Meter, foreign_share
from benchmarks.report import Series

Step = Callable[[], object]


def interleave(
    variants: Mapping[str, Step], rounds: int, turns: int, steps: int, meet: Step
) -> list[dict[str, Any]]:
    """Run `rounds` rounds of `turns` turns each, `steps` steps per turn and variant.

    `meet` synchronises the processes before a turn, outside the timed part. Every other turn
    runs in the opposite order, so no variant always follows the same one.
    """
    return [_round(variants, turns, steps, meet) for _ in range(rounds)]


def _round(variants: Mapping[str, Step], turns: int, steps: int, meet: Step) -> dict[str, Any]:
    names, total = list(variants), {name: [0.0, 0.0] for name in variants}
    cpu = time.process_time()
    with Meter() as meter:
        for turn in range(turns):
            for name in names if turn % 2 == 0 else reversed(names):
                meet()
                seconds, cpu_seconds = _timed(variants[name], steps)
                total[name][0] += seconds
                total[name][1] += cpu_seconds
    return {
        "steps": turns * steps,
        "seconds": total,
        "wall_s": meter.wall_s,
        "busy_s": meter.busy_s,
        "cpu_s": time.process_time() - cpu,
    }


def _timed(step: Step, steps: int) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return time.perf_counter() - wall, time.process_time() - cpu


def series(workers: Sequence[list[dict[str, Any]]]) -> list[Series]:
    """One series per variant, with the rate of the slowest worker."""
    rounds = list(zip(*workers, strict=True))
    return [
        Series(
            name,
            rates=[r[0]["steps"] / max(w["seconds"][name][0] for w in r) for r in rounds],
            cpu_ms=[
                1e3 * sum(w["seconds"][name][1] for w in r) / len(r) / r[0]["steps"] for r in rounds
            ],
        )
        for name in workers[0][0]["seconds"]
    ]


def foreign(workers: Sequence[list[dict[str, Any]]]) -> list[float | None]:
    """Other programs' share of the machine in each round."""
    return [
        foreign_share(r[0]["wall_s"], r[0]["busy_s"], sum(w["cpu_s"] for w in r))
        for r in zip(*workers, strict=True)
    ]
