# SPDX-License-Identifier: Apache-2.0
"""Turns: one job runs while the others are stopped, and counts only in its own turns."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import jobs, turns

pytestmark = pytest.mark.slow

#: makes steps forever, and writes its process id for the test
STEP = """
import os, sys
from pathlib import Path
from benchmarks.turns import Counter
Path(sys.argv[1]).write_text(str(os.getpid()))
counter = Counter(Path(), 0)
while True:
    counter.add()
"""


def stepping(name: str, pid: Path, code: str = STEP) -> jobs.Job:
    """A job of one process."""
    command = jobs.Command([sys.executable, "-c", code, str(pid)])
    return jobs.Job(name, [command], results=1, deadline_s=60.0)


@pytest.mark.long
def test_each_job_has_its_turns_and_all_are_ended(tmp_path: Path) -> None:
    make = {n: lambda n=n: stepping(n, tmp_path / n) for n in ("a", "b")}
    series, shares = turns.take(make, rounds=2, turns=2, turn_s=0.1)
    assert [one.name for one in series] == ["a", "b"]
    assert all(rate > 0 for one in series for rate in one.rates)
    assert [len(one.rates) for one in series] == [len(one.cpu_ms) for one in series] == [2, 2]
    assert len(shares) == 2
    for name in make:
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)


def test_one_job_is_switched_before_each_turn(tmp_path: Path) -> None:
    said: list[str] = []
    switch = {name: functools.partial(said.append, name) for name in ("on", "off")}
    job = stepping("one", tmp_path / "one")
    series, shares = turns.take_switched(job, switch, rounds=1, turns=2, turn_s=0.1)
    # every second turn is in the opposite order
    assert said == ["on", "off", "off", "on"]
    assert [one.name for one in series] == ["on", "off"]
    assert all(rate > 0 for one in series for rate in one.rates)
    assert len(shares) == 1


def test_a_job_without_a_turn_is_stopped(tmp_path: Path) -> None:
    with (
        turns._player(stepping("a", tmp_path / "a")) as one,
        turns._player(stepping("b", tmp_path / "b")) as other,
    ):
        one.play(0.1)
        # the signal takes effect when the process is scheduled; then it stops
        while _state(one) != "T":
            os.sched_yield()
        before = one._counts()
        share = other.play(0.1)
        assert one._counts() == before
        assert share.steps > 0
        assert 0 < share.cpu_s <= share.seconds + 0.05


def _state(player: turns._Player) -> str:
    stat = Path(f"/proc/{player.processes[0].pid}/stat").read_text()
    return stat.rpartition(") ")[2][0]


def test_a_job_is_at_work_once_every_worker_made_a_step(tmp_path: Path) -> None:
    player = turns._Player(jobs.Job("two", [], results=2, deadline_s=0.0), [], tmp_path)
    turns.Counter(tmp_path, 0).add()
    for late in ("not there", "empty"):
        if late == "empty":
            (tmp_path / "1.steps").touch()
        assert player._counts() == [1, 0]
        with pytest.raises(jobs.BenchmarkError, match="two: not every worker has made a step"):
            player.wait_until_at_work()
    turns.Counter(tmp_path, 1).add()
    player.wait_until_at_work()


def test_a_job_that_ends_is_reported(tmp_path: Path) -> None:
    bad = stepping("bad", tmp_path / "a", "raise SystemExit('no room')")
    with pytest.raises(jobs.BenchmarkError, match=r"(?s)bad has ended:.*no room"):
        turns.take({"bad": lambda: bad}, 1, 1, 0.1)


def test_a_job_that_makes_no_step_is_reported(tmp_path: Path) -> None:
    hangs = STEP.replace("while True:", "counter.add()\nwhile True:\n    continue")
    with pytest.raises(jobs.BenchmarkError, match="slow made no step"):
        turns.take({"slow": lambda: stepping("slow", tmp_path / "a", hangs)}, 1, 1, 0.1)


ENDED = """
import pathlib, sys
from tests.benchmarks.test_turns import stepping
from benchmarks import turns
pid = pathlib.Path(sys.argv[1])
turns.take({"one": lambda: stepping("one", pid)}, 1000, 1, 0.1)
"""


@pytest.mark.multiprocess
def test_a_terminated_benchmark_leaves_no_job_running(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-c", ENDED, str(tmp_path / "pid")]
    with subprocess.Popen(
        command, cwd=jobs.ROOT, env=jobs.environment({}), stdout=subprocess.PIPE
    ) as benchmark:
        assert benchmark.stdout is not None
        # after a round, the job is stopped
        assert b"round 1/1000" in benchmark.stdout.readline()
        benchmark.terminate()
        assert benchmark.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
