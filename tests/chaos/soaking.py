# SPDX-License-Identifier: Apache-2.0
"""Trains for a long time while processes are killed, and checks that the others do not grow.

The second server and the second worker are killed repeatedly. The first ones and fleetrun run all
the time; their memory, files and threads must not grow.

python -m tests.chaos.soaking --minutes 30
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.chaos.killing import ChaosError, end_of, paths

SCRIPT = Path(__file__).with_name("soak_train.py")
#: processes that run all the time, in addition to fleetrun, and those that do not
LIVING = ("server.0", "worker.0")
DYING = ("server.1", "worker.1")
FLAT = 0.05
PATIENCE_S = 100.0
_LOOK_S = 2.0


@dataclasses.dataclass(frozen=True)
class Look:
    """The resources of a process at one time."""

    mib: float
    files: int
    threads: int


@dataclasses.dataclass(frozen=True)
class Course:
    """Its resources in the middle third of the time, and in the last one."""

    middle: Sequence[Look]
    last: Sequence[Look]

    @classmethod
    def of(cls, looks: Sequence[Look]) -> Course:
        """Omit the first third, in which memory still grows to its working size."""
        third = len(looks) // 3
        return cls(looks[third : 2 * third], looks[2 * third :])

    @property
    def growth(self) -> float:
        """The growth of memory, from the middle of one third to the middle of the other."""
        before, after = (
            statistics.median(look.mib for look in part) for part in (self.middle, self.last)
        )
        return after / before - 1

    @property
    def leaks(self) -> bool:
        """True where even the fewest files or threads of the end exceed the most of before."""
        return any(
            min(getattr(look, what) for look in self.last)
            > max(getattr(look, what) for look in self.middle)
            for what in ("files", "threads")
        )

    def __str__(self) -> str:
        mib, files, threads = (
            statistics.median(getattr(look, what) for look in self.last)
            for what in ("mib", "files", "threads")
        )
        return f"{mib:.0f} MiB ({self.growth:+.1%}), {files:g} files, {threads:g} threads"


def look(pid: int) -> Look | None:
    """The resources of a process now; None where it is gone."""
    # a process that ends loses its memory before it is gone
    with contextlib.suppress(OSError, StopIteration, KeyError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        files = len(os.listdir(f"/proc/{pid}/fd"))
        return Look(int(fields["RssAnon"].split()[0]) / 1024, files, int(fields["Threads"]))
    return None


def soak(folder: Path, minutes: float, every_s: float, seed: int) -> tuple[int, dict[str, Course]]:
    """Kill a process at intervals; returns the number of kills and the growth of the others."""
    kills = int(60 * minutes / every_s) + 10
    counts = ["--server_num", "2", "--worker_num", "2", "--max_restarts", str(kills)]
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "fleetlight.launch", *counts, str(SCRIPT)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths()},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        killed, looks = _watch(folder, job, 60 * minutes, every_s, random.Random(seed))
        (folder / "enough").touch()
        job.wait(PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise ChaosError(f"{error}\n{end_of(folder)}") from error
    finally:
        job.terminate()
        job.wait()
    if job.returncode or "restarting all processes" in (folder / "output").read_text():
        raise ChaosError(f"exit code {job.returncode}\n{end_of(folder)}")
    return killed, {name: Course.of(of) for name, of in looks.items()}


def _watch(
    folder: Path,
    job: subprocess.Popen[bytes],
    seconds: float,
    every_s: float,
    chance: random.Random,
) -> tuple[int, Mapping[str, list[Look]]]:
    looks: dict[str, list[Look]] = {name: [] for name in ("fleetrun", *LIVING)}
    begin, killed, victims = time.monotonic(), 0, dict.fromkeys(DYING, 0)
    due = begin + every_s
    while time.monotonic() < begin + seconds and job.poll() is None:
        for name, of in looks.items():
            found = look(job.pid if name == "fleetrun" else _pid(folder, name))
            if found is not None:
                of.append(found)
        if time.monotonic() > due:
            due += every_s
            victim = chance.choice(DYING)
            pid = _pid(folder, victim)
            if pid and pid != victims[victim]:
                victims[victim] = pid
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
        time.sleep(_LOOK_S)
    return killed, looks


def _pid(folder: Path, name: str) -> int:
    """0 until the file exists."""
    path = folder / f"pid.{name}"
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith("\n") else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Soak and report; returns 1 where a process grew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every_s", type=float, default=20.0, help="between two kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        killed, courses = soak(Path(folder), options.minutes, options.every_s, options.seed)
    print(f"{options.minutes:g} minutes, {killed} kills, seed {options.seed}")
    for name, course in courses.items():
        print(f"{name}: {course}")
    grown = [n for n, c in courses.items() if abs(c.growth) > FLAT or c.leaks]
    print(f"grown: {', '.join(grown) or 'none'}")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
