# SPDX-License-Identifier: Apache-2.0
"""Variants that take turns, so that whatever else the machine does meets all of them alike.

They are fresh jobs (`run_jobs`), jobs that are all there while one goes on and the others stand
still (`run_paused`), or functions inside one process (`stepping`). As a program it compares any
commands that print a line RESULT {"steps": 100, "seconds": 1.9}: say --job NAME=COMMAND for each.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from benchmarks import jobs, report
from benchmarks.machine import Meter, foreign_share, wait_until_idle
from benchmarks.peers.ps_timed import cpu_s
from benchmarks.report import Series

T = TypeVar("T")
Step = Callable[[], object]
#: what a variant did in a turn: steps, seconds, CPU seconds
Share = tuple[int, float, float]
Play = Callable[[], Share]
#: a round: the sums of each variant, and the machine's time, as JSON has it
Round = dict[str, Any]
Runs = dict[str, list[jobs.Run]]


def in_turn(plays: Mapping[str, Callable[[], T]], turns: int) -> Iterator[tuple[str, T]]:
    """Every other turn runs in the opposite order, so no variant always follows the same one."""
    for turn in range(turns):
        for name in plays if turn % 2 == 0 else reversed(list(plays)):
            yield name, plays[name]()


def interleave(
    plays: Mapping[str, Play], rounds: int, turns: int, spent_s: Callable[[], float] | None = None
) -> list[Round]:
    """Rounds of so many turns; `spent_s` tells the CPU seconds of other processes of ours."""
    spent_s = spent_s or time.process_time
    found: list[Round] = []
    for _ in range(rounds):
        total = {name: [0.0, 0.0, 0.0] for name in plays}
        before = spent_s()
        with Meter() as meter:
            for name, share in in_turn(plays, turns):
                total[name] = [a + b for a, b in zip(total[name], share, strict=True)]
        machine_s = {"wall_s": meter.wall_s, "busy_s": meter.busy_s}
        found.append({"total": total, **machine_s, "cpu_s": spent_s() - before})
    return found


def series(workers: Sequence[list[Round]]) -> list[Series]:
    """One series per variant, with the rate of the slowest worker."""
    rounds = [[one["total"] for one in each] for each in zip(*workers, strict=True)]
    return [
        Series(
            name,
            [min(w[name][0] / w[name][1] for w in r) for r in rounds],
            [1e3 * sum(w[name][2] for w in r) / sum(w[name][0] for w in r) for r in rounds],
        )
        for name in workers[0][0]["total"]
    ]


def foreign(workers: Sequence[list[Round]]) -> list[float | None]:
    """Other programs' share of the machine in each round."""
    return [
        foreign_share(r[0]["wall_s"], r[0]["busy_s"], sum(w["cpu_s"] for w in r))
        for r in zip(*workers, strict=True)
    ]


# -- functions inside one process


def stepping(step: Step, steps: int, meet: Step) -> Play:
    """A turn of some steps; `meet` synchronises the processes before it."""

    def play() -> Share:
        meet()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        return steps, time.perf_counter() - wall, time.process_time() - cpu

    return play


# -- fresh jobs


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options of a benchmark that starts jobs."""
    made = report.parser(description, rounds)
    made.add_argument("--idle_s", type=float, default=0.0, help="wait for an idle machine first")
    return made


def run_jobs(
    make: Mapping[str, Callable[[], jobs.Job]], rounds: int, idle_s: float = 0.0, attempts: int = 2
) -> Runs:
    """Each job once a round; `make[name]()` returns a new one, since ports differ between runs.

    A failed job is reported and repeated: a peer that sometimes does not start need not end a long
    comparison.
    """
    runs: Runs = {name: [] for name in make}
    plays = {name: functools.partial(_run, one, idle_s, attempts) for name, one in make.items()}
    for name, run in in_turn(plays, rounds):
        runs[name].append(run)
        rate = f"{report.short(run.rate)} steps/s, " if "steps" in run.results[0] else ""
        print(f"{name}: {rate}{report.short(run.wall_s)} s", flush=True)
    return runs


def _run(make: Callable[[], jobs.Job], idle_s: float, attempts: int) -> jobs.Run:
    for _ in range(attempts - 1):
        wait_until_idle(idle_s)
        try:
            return jobs.run(make())
        except jobs.BenchmarkError as error:
            print(f"an attempt failed: {error}", flush=True)
    return jobs.run(make())


def job_series(runs: Runs) -> dict[str, Series]:
    """Rates and CPU cost of each job over the rounds."""
    return {n: Series(n, [r.rate for r in of], [r.cpu_ms for r in of]) for n, of in runs.items()}


def job_foreign(runs: Runs) -> list[float | None]:
    """Other programs' share of the machine during every run."""
    return [one.foreign for of in runs.values() for one in of]


# -- jobs that stand still between their turns

#: a turn is counted once what has stood still is warm again
_SETTLE_S = 0.3


class Counter:
    """How many steps a worker has made, in a file that others read meanwhile."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._steps = np.memmap(folder / f"{rank}.steps", np.int64, "w+", shape=(1,))

    def add(self) -> None:
        """One more."""
        self._steps[0] += 1


def run_paused(
    make: Mapping[str, Callable[[], jobs.Job]], rounds: int, turns: int, turn_s: float
) -> list[Round]:
    """Rounds of jobs whose workers count their steps; all are ended after the last turn."""
    with contextlib.ExitStack() as ending:
        ending.enter_context(jobs.ending_at_sigterm())
        players = {name: ending.enter_context(_player(one())) for name, one in make.items()}
        plays = {name: functools.partial(one.play, turn_s) for name, one in players.items()}
        return interleave(
            plays, rounds, turns, lambda: sum(one.spent_s() for one in players.values())
        )


@dataclasses.dataclass(frozen=True)
class _Player:
    """A job that is there."""

    job: jobs.Job
    processes: Sequence[subprocess.Popen[bytes]]
    folder: Path

    def wait_until_at_work(self) -> None:
        """Every worker has made a step."""
        end = time.monotonic() + self.job.deadline_s
        while not all(self._counts()):
            ended = any(process.poll() is not None for process in self.processes)
            if ended or time.monotonic() > end:
                why = "a process has ended" if ended else "not every worker has made a step"
                raise jobs.BenchmarkError(f"{self.job.name}: {why}:\n{jobs.tail(self.folder)}")
            time.sleep(0.05)

    def spent_s(self) -> float:
        """CPU seconds of all processes."""
        return sum(cpu_s(process.pid) for process in self.processes)

    def say(self, number: signal.Signals) -> None:
        """A signal to all processes."""
        for process in self.processes:
            process.send_signal(number)

    def play(self, turn_s: float) -> Share:
        """Go on for so long, and stand still again."""
        self.say(signal.SIGCONT)
        time.sleep(_SETTLE_S)
        steps, cpu, began = sum(self._counts()), self.spent_s(), time.perf_counter()
        time.sleep(turn_s)
        now = sum(self._counts()), time.perf_counter() - began, self.spent_s() - cpu
        self.say(signal.SIGSTOP)
        if now[0] == steps:
            raise jobs.BenchmarkError(f"{self.job.name}: no step\n{jobs.tail(self.folder)}")
        return now[0] - steps, now[1], now[2]

    def _counts(self) -> list[int]:
        files = [self.folder / f"{rank}.steps" for rank in range(self.job.results)]
        # one that is not there yet, or still empty, counts nothing
        return [int(np.fromfile(file, np.int64).sum()) if file.exists() else 0 for file in files]


@contextlib.contextmanager
def _player(job: jobs.Job) -> Iterator[_Player]:
    """A job that was started, is at work, and stands still; in the end it is killed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        player = _Player(job, jobs.start(job, Path(name)), Path(name))
        try:
            player.wait_until_at_work()
            player.say(signal.SIGSTOP)
            yield player
        finally:
            for process in player.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Compare any commands."""
    made = parser(__doc__, rounds=5)
    add = made.add_argument
    add("--job", action="append", required=True, metavar="NAME=COMMAND", help="the first is 1.0")
    add("--name", default="comparison", help="name of the result page")
    add("--results", type=int, default=1, help="RESULT lines expected of a job")
    options = made.parse_args(argv)
    make = {}
    for text in options.job:
        name, _, command = text.partition("=")
        commands = [jobs.Command(shlex.split(command))]
        make[name] = functools.partial(jobs.Job, name, commands, options.results)
    runs = run_jobs(make, 1 if options.quick else options.rounds, options.idle_s)
    first, *rest = job_series(runs).values()
    ratios = [report.Ratio(one, first) for one in rest]
    text = report.section("Commands", [first, *rest], ratios, job_foreign(runs))
    return report.page(options.name, "Commands compared round by round.", [text], options.quick)


if __name__ == "__main__":
    sys.exit(main())
