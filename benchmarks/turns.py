# SPDX-License-Identifier: Apache-2.0
"""Jobs that take turns of a few seconds: all are there, one goes on, the others stand still.

Runs of fresh processes minutes apart differ by more than what is to be measured. Here whatever else
the machine does meets all jobs alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks import jobs
from benchmarks.machine import Meter, foreign_share
from benchmarks.peers.ps_timed import cpu_s
from benchmarks.report import Series

#: a turn is counted once what has stood still is warm again
SETTLE_S = 0.3
_LOOK_EVERY_S = 0.05


class Counter:
    """How many steps a worker has made, in a file that others read meanwhile."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._steps = np.memmap(folder / f"{rank}.steps", np.int64, "w+", shape=(1,))

    def add(self) -> None:
        """One more."""
        self._steps[0] += 1


@dataclasses.dataclass
class _Share:
    """What a job has done in its turns."""

    steps: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0


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
            if any(process.poll() is not None for process in self.processes):
                raise jobs.BenchmarkError(f"{self.job.name} has ended:\n{jobs.tail(self.folder)}")
            if time.monotonic() > end:
                raise jobs.BenchmarkError(
                    f"{self.job.name}: not every worker has made a step within "
                    f"{self.job.deadline_s:g} s:\n{jobs.tail(self.folder)}"
                )
            time.sleep(_LOOK_EVERY_S)

    def spent_s(self) -> float:
        """CPU seconds of all processes."""
        return sum(cpu_s(process.pid) for process in self.processes)

    def say(self, number: signal.Signals) -> None:
        """A signal to all processes."""
        for process in self.processes:
            process.send_signal(number)

    def play(self, turn_s: float) -> _Share:
        """Go on for so long, and stand still again."""
        self.say(signal.SIGCONT)
        time.sleep(SETTLE_S)
        steps, cpu, began = self._reached()
        time.sleep(turn_s)
        now = self._reached()
        self.say(signal.SIGSTOP)
        if now[0] == steps:
            raise jobs.BenchmarkError(
                f"{self.job.name} made no step in {turn_s:g} s:\n{jobs.tail(self.folder)}"
            )
        return _Share(now[0] - steps, now[2] - began, now[1] - cpu)

    def _reached(self) -> tuple[int, float, float]:
        """Steps, CPU seconds, and the time."""
        return sum(self._counts()), self.spent_s(), time.perf_counter()

    def _counts(self) -> list[int]:
        """Of each worker."""
        files = [self.folder / f"{rank}.steps" for rank in range(self.job.results)]
        # one that is not there yet, or still empty, counts nothing
        return [int(np.fromfile(file, np.int64).sum()) if file.exists() else 0 for file in files]


def take(
    make: Mapping[str, Callable[[], jobs.Job]], rounds: int, turns: int, turn_s: float
) -> tuple[list[Series], list[float | None]]:
    """`rounds` rounds of `turns` turns of each job; and other programs' share of each round.

    Every other turn is in the opposite order, so no job always follows the same one.
    """
    with contextlib.ExitStack() as ending:
        ending.enter_context(jobs.ending_at_sigterm())
        players = {name: ending.enter_context(_player(one())) for name, one in make.items()}
        turn = {name: functools.partial(one.play, turn_s) for name, one in players.items()}
        return _rounds(turn, lambda: sum(one.spent_s() for one in players.values()), rounds, turns)


def take_switched(
    job: jobs.Job, switch: Mapping[str, Callable[[], None]], rounds: int, turns: int, turn_s: float
) -> tuple[list[Series], list[float | None]]:
    """As `take`, with one job that a function switches before each turn.

    Two jobs of one kind differ by some percent, since their memory and their places differ. So
    this tells smaller differences.
    """
    with contextlib.ExitStack() as ending:
        ending.enter_context(jobs.ending_at_sigterm())
        player = ending.enter_context(_player(job))

        def played(make_ready: Callable[[], None]) -> _Share:
            make_ready()
            return player.play(turn_s)

        turn = {name: functools.partial(played, one) for name, one in switch.items()}
        return _rounds(turn, player.spent_s, rounds, turns)


def _rounds(
    turn: Mapping[str, Callable[[], _Share]], spent_s: Callable[[], float], rounds: int, turns: int
) -> tuple[list[Series], list[float | None]]:
    shares: list[float | None] = []
    played: dict[str, list[_Share]] = {name: [] for name in turn}
    for number in range(rounds):
        before = spent_s()
        with Meter() as meter:
            found = _round(turn, turns)
        shares.append(foreign_share(meter.wall_s, meter.busy_s, spent_s() - before))
        for name, share in found.items():
            played[name].append(share)
        told = ", ".join(f"{n} {s.steps / s.seconds:.1f} steps/s" for n, s in found.items())
        print(f"round {number + 1}/{rounds}: {told}", flush=True)
    series = [
        Series(name, [s.steps / s.seconds for s in of], [1e3 * s.cpu_s / s.steps for s in of])
        for name, of in played.items()
    ]
    return series, shares


def _round(turn: Mapping[str, Callable[[], _Share]], turns: int) -> dict[str, _Share]:
    found = {name: _Share() for name in turn}
    for number in range(turns):
        for name in turn if number % 2 == 0 else reversed(list(turn)):
            share = turn[name]()
            found[name].steps += share.steps
            found[name].seconds += share.seconds
            found[name].cpu_s += share.cpu_s
    return found


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
