# SPDX-License-Identifier: Apache-2.0
"""Kills all processes of a job that counts, and its launcher, at once; then the job resumes.

python -m tests.chaos.whole --mode sync async ssp geo --rounds 20 --seed 1
"""

import argparse
import contextlib
import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.killing import MODES, PATIENCE_S, SCRIPT, SERVERS, WORKERS, ChaosError, paths

#: a job is killed within so many seconds after its start, its first step or its end
STARTING_S, TRAINING_S = 6.0, 2.0
ENDED = "there is nothing to resume from"
WELL = "the job before has ended well"
RESUMED = "resuming each worker at its last step"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one job."""

    counted: int
    kills: int
    #: starts after a kill that resumed where each worker was
    resumed: int

    def __str__(self) -> str:
        return (
            f"{self.kills} kills of all processes, {self.resumed} resumed within training, "
            f"{self.counted} rows counted: 0 lost, 0 doubled"
        )


def chaos(
    folder: Path, mode: str, kills: int, seed: int, *, deal: str = "blocks", saves: bool = False
) -> Outcome:
    """Run a job of two workers and two servers; kill all of it so many times, last at its end.

    `saves`: the job also saves checkpoints.
    """
    chance, resumed, resumes = random.Random(f"{seed} {mode} {deal}"), 0, False
    script = ["--mode", mode, "--seed", str(seed), "--deal", deal]
    flags = []
    if saves:
        script += ["--every_steps", "40"]
        flags += ["--checkpoint", "checkpoint"]
    done = number = 0
    while True:
        job = _start(folder, number, flags + ["--resume"] * resumes, script)
        killed = done < kills and _kill(folder, job, chance, is_last=done == kills - 1)
        done += killed
        if not killed:
            _finish(folder, job, f"{mode}, seed {seed}")
        output = _output(folder, number)
        number += 1
        resumed += RESUMED in output
        if ENDED in output and WELL not in output:
            # it was killed before its first record
            resumes = False
        elif killed:
            resumes = True
        elif job.returncode == 0 or WELL in output:
            return Outcome(_counted(folder, mode, seed), done, resumed)
        else:
            raise ChaosError(f"{mode}, seed {seed}: exit code {job.returncode}\n{_outputs(folder)}")


def _finish(folder: Path, job: subprocess.Popen[bytes], label: str) -> None:
    (folder / "enough").touch()
    try:
        job.wait(PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        _end(_tree(job.pid))
        raise ChaosError(f"{label}: {error}\n{_outputs(folder)}") from error


def _start(
    folder: Path, number: int, flags: Sequence[str], script: Sequence[str]
) -> subprocess.Popen[bytes]:
    size = ["--server_num", str(SERVERS), "--worker_num", str(WORKERS), "--tee"]
    with (folder / f"output.{number}").open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "fleetlight.launch", *size, *flags, str(SCRIPT), *script],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths()},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _kill(
    folder: Path, job: subprocess.Popen[bytes], chance: random.Random, *, is_last: bool
) -> bool:
    """Kill all during the start, training or the end; False where the job ended before."""
    phase = (
        "end" if is_last and chance.random() < 0.5 else chance.choice(("start", "train", "train"))
    )
    if phase == "start":
        _wait(job, chance.uniform(0, STARTING_S))
    else:
        _wait_for_training(folder, job)
        if phase == "end":
            (folder / "enough").touch()
        _wait(job, chance.uniform(0, TRAINING_S))
    if job.poll() is not None:
        return False
    _end(_tree(job.pid))
    job.wait(PATIENCE_S)
    return True


def _wait_for_training(folder: Path, job: subprocess.Popen[bytes]) -> None:
    """Wait until a worker has made a step in this start."""
    began = time.time()
    files = [folder / f"pid.worker.{number}" for number in range(WORKERS)]
    end = time.monotonic() + PATIENCE_S
    while job.poll() is None and time.monotonic() < end:
        if any(one.exists() and one.stat().st_mtime > began for one in files):
            return
        time.sleep(0.02)


def _wait(job: subprocess.Popen[bytes], seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(seconds)


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(folder.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def _end(pids: Sequence[int]) -> None:
    """Kill all at once: none acts between the deaths of two."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    end = time.monotonic() + PATIENCE_S
    while any(_is_there(pid) for pid in pids[1:]) and time.monotonic() < end:
        time.sleep(0.01)


def _is_there(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def _output(folder: Path, number: int) -> str:
    return (folder / f"output.{number}").read_text()


def _outputs(folder: Path) -> str:
    """The last output of each start."""
    files = sorted(folder.glob("output.*"))
    return "\n".join(
        f"--- {one.name}\n" + "\n".join(one.read_text().splitlines()[-25:]) for one in files
    )


def _counted(folder: Path, mode: str, seed: int) -> int:
    """The rows that all workers counted; a worker that was killed reports them again.

    Read from their logs: a launcher may be killed before it passes the output on.
    """
    logs = sorted((folder / "log").rglob("workerlog.*"), key=lambda one: one.stat().st_mtime_ns)
    counted = [
        (one.suffix, *found)
        for one in logs
        for found in re.findall(r"COUNTED (\d+) lost (\S+) doubled (\S+)", one.read_text())
    ]
    wrong = [one for one in counted if float(one[2]) or float(one[3])]
    last = {worker: int(rows) for worker, rows, _, _ in counted}
    if wrong or len(last) != WORKERS or len(set(last.values())) != 1:
        raise ChaosError(f"{mode}, seed {seed}: counted {counted}\n{_outputs(folder)}")
    return sum(last.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Run so many jobs in each mode; returns 1 where a count was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, default=3, help="jobs in each mode")
    parser.add_argument("--kills", type=int, default=2, help="of each job, all its processes")
    parser.add_argument("--seed", type=int, default=0, help="of the first job")
    parser.add_argument("--deal", choices=("blocks", "queue"), default="blocks")
    parser.add_argument("--saves", action="store_true", help="checkpoints, too")
    options = parser.parse_args(argv)
    for mode in options.mode:
        if mode == "sync" and options.deal == "queue":
            continue
        outcomes = []
        for seed in range(options.seed, options.seed + options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    more = {"deal": options.deal, "saves": options.saves}
                    outcomes.append(chaos(Path(folder), mode, options.kills, seed, **more))
                except ChaosError as error:
                    print(error)
                    return 1
        total = Outcome(
            sum(one.counted for one in outcomes),
            sum(one.kills for one in outcomes),
            sum(one.resumed for one in outcomes),
        )
        print(f"{mode}, {len(outcomes)} jobs from seed {options.seed}: {total}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
