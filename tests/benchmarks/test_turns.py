# SPDX-License-Identifier: Apache-2.0
"""Turns: one job goes on, the others stand still, and each is counted in its own turns only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import jobs, turns

pytestmark = pytest.mark.slow

#: makes steps for ever, and leaves its process id where the test can read it
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


def test_each_has_its_turns_and_all_are_ended(tmp_path: Path) -> None:
    make = {n: lambda n=n: stepping(n, tmp_path / n) for n in ("a", "b")}
    series, shares = turns.take(make, rounds=2, turns=2, turn_s=0.1)
    assert [one.name for one in series] == ["a", "b"]
    assert all(rate > 0 for one in series for rate in one.rates)
    assert [len(one.rates) for one in series] == [len(one.cpu_ms) for one in series] == [2, 2]
    assert len(shares) == 2
    for name in make:
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)


def test_who_has_no_turn_stands_still(tmp_path: Path) -> None:
    with (
        turns._player(stepping("a", tmp_path / "a")) as one,
        turns._player(stepping("b", tmp_path / "b")) as other,
    ):
        one.play(0.1)
        # a signal is there when the process is scheduled next; then nothing moves
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


def test_a_job_is_at_work_once_every_worker_is(tmp_path: Path) -> None:
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


def test_a_job_that_ends_is_told_of(tmp_path: Path) -> None:
    bad = stepping("bad", tmp_path / "a", "raise SystemExit('no room')")
    with pytest.raises(jobs.BenchmarkError, match=r"(?s)bad has ended:.*no room"):
        turns.take({"bad": lambda: bad}, 1, 1, 0.1)


def test_a_job_that_makes_no_step_in_its_turn_is_told_of(tmp_path: Path) -> None:
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
def test_a_benchmark_that_is_asked_to_end_leaves_no_job_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-u", "-c", ENDED, str(tmp_path / "pid")]
    with subprocess.Popen(
        command, cwd=jobs.ROOT, env=jobs.environment({}), stdout=subprocess.PIPE
    ) as benchmark:
        assert benchmark.stdout is not None
        # a round is over, and its job stands still
        assert b"round 1/1000" in benchmark.stdout.readline()
        benchmark.terminate()
        assert benchmark.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
