# SPDX-License-Identifier: Apache-2.0
"""Kills processes of a job that counts, at moments that a seed decides, and reports the result.

python -m tests.chaos.killing --mode async --kills 100 --seed 1
"""

import argparse
import contextlib
import dataclasses
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.harms import HARMS
from tests.chaos.incarnations import KINDS, Name, at_work

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("counting.py")
#: the log line of a job that restarts and counts again
AGAIN = "restarting all processes"
#: how long a server may take to restart, and a job to end
PATIENCE_S = 100.0
#: the seconds between two kills
SPREAD_S = 0.6
FROZEN_S = 3.0
SERVERS, WORKERS = KINDS["server"], KINDS["worker"]
MODES = ("sync", "async", "ssp", "geo")


class ChaosError(AssertionError):
    """A count was wrong, or a process never restarted; the text has the seed."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one run."""

    #: rows that were pushed and acknowledged
    counted: int
    #: seconds from each kill until the process was at work again
    away_s: Sequence[float]

    def __str__(self) -> str:
        known = [one for one in self.away_s if not math.isnan(one)]
        away = (
            f"; one was away for {statistics.median(known):.1f} s in the middle, "
            f"{max(known):.1f} s at most"
            if known
            else ""
        )
        return f"{len(self.away_s)} kills, {self.counted} rows counted: 0 lost, 0 doubled{away}"


def chaos(
    folder: Path,
    mode: str,
    kills: int,
    seed: int,
    *,
    kinds: Sequence[str] = ("server", "worker"),
    harms: Sequence[str] = (),
    self_kill: bool = False,
    deal: str = "blocks",
    width: int = 1,
) -> Outcome:
    """Run a job of two workers and two servers, and kill processes of it so many times.

    `self_kill`: processes kill themselves within an action. `harms` affect all of them meanwhile.
    With "freeze", every second kill stops a process for a while instead. Rows of a `width` of 512
    go through shared memory.
    """
    counts = ["--server_num", str(SERVERS), "--worker_num", str(WORKERS)]
    flags = [*counts, "--max_restarts", str(kills + 2 * (SERVERS + WORKERS))]
    script = [str(SCRIPT), "--mode", mode, "--seed", str(seed), "--deal", deal]
    script += ["--width", str(width), "--self_kill"]
    script += kinds if self_kill else []
    script += ["--harms", *(harm for harm in harms if harm in HARMS)]
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "fleetlight.launch", *flags, "--tee", *script],
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": paths(),
                "FLEET_LOG_LEVEL": "debug",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        if self_kill:
            away_s = _wait(folder, job, kills)
        else:
            freezes = "freeze" in harms
            away_s = _kill(folder, job, random.Random(seed), kills, kinds, freezes=freezes)
        (folder / "enough").touch()
        job.wait(PATIENCE_S)
    except (ChaosError, subprocess.TimeoutExpired) as error:
        raise ChaosError(f"{mode}, seed {seed}: {error}\n{end_of(folder)}") from error
    finally:
        job.terminate()
        job.wait()
    return outcome_of(folder, f"{mode}, seed {seed}", [job.returncode], away_s)


def outcome_of(
    folder: Path, name: str, codes: Sequence[int | None], away_s: Sequence[float]
) -> Outcome:
    """The outcome by the output of the job; raises if a count is wrong or a process failed."""
    output = (folder / "output").read_text()
    counted = re.findall(r"COUNTED (\d+) lost (\S+) doubled (\S+)\n", output)
    wrong = [one for one in counted if float(one[1]) or float(one[2])]
    # a job that restarted as a whole would count again from zero
    if any(codes) or wrong or len(counted) != WORKERS or AGAIN in output:
        raise ChaosError(
            f"{name}: exit codes {codes}, counted, lost and doubled: {counted}\n{end_of(folder)}"
        )
    return Outcome(sum(int(number) for number, _, _ in counted), away_s)


def paths() -> str:
    """An environment in which scripts find this folder and the package."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _wait(folder: Path, job: subprocess.Popen[bytes], kills: int) -> list[float]:
    """Wait until enough processes have killed themselves; their restart times are unknown."""
    seen, end = 0, time.monotonic() + PATIENCE_S
    while seen < kills and job.poll() is None:
        now = (folder / "output").read_text().count("; restarting it (restart ")
        if now > seen:
            seen, end = now, time.monotonic() + PATIENCE_S
        elif time.monotonic() > end:
            raise ChaosError(f"no process has died or come back for {PATIENCE_S:g} s")
        time.sleep(0.05)
    return [math.nan] * seen


def _kill(
    folder: Path,
    job: subprocess.Popen[bytes],
    chance: random.Random,
    kills: int,
    kinds: Sequence[str],
    *,
    freezes: bool,
) -> list[float]:
    victims = [(kind, number) for kind in kinds for number in range(KINDS[kind])]
    pids = {victim: _pid(folder, job, victim, 0) for victim in victims}
    away_s = []
    for _ in range(kills):
        victim = chance.choice(victims)
        time.sleep(chance.uniform(0, SPREAD_S))
        if freezes:
            _freeze(pids[chance.choice(victims)], chance.uniform(0, FROZEN_S))
        with contextlib.suppress(ProcessLookupError):
            # unless the job has failed
            os.kill(pids[victim], signal.SIGKILL)
        began = time.monotonic()
        pids[victim] = _pid(folder, job, victim, pids[victim])
        away_s.append(time.monotonic() - began)
    return away_s


def _freeze(pid: int, seconds: float) -> None:
    """Stop a process for a while, as a machine that migrates or pages does."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


def _pid(folder: Path, job: subprocess.Popen[bytes], name: Name, before: int) -> int:
    """The pid of a process's present incarnation, once it is at work."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and job.poll() is None:
        found = at_work(folder, name)
        if found is not None and found.pid != before:
            return found.pid
        time.sleep(0.01)
    raise ChaosError(f"{name[0]} {name[1]} did not come (back)")


def end_of(folder: Path) -> str:
    """The last output of a job, and that before it restarted as a whole."""
    lines = (folder / "output").read_text().splitlines()
    again = next((number for number, line in enumerate(lines) if AGAIN in line), 0)
    return "\n".join([*lines[max(0, again - 15) : again + 1], "...", *lines[-25:]])


def main(argv: Sequence[str] | None = None) -> int:
    """Kill as often as requested; returns 1 if a count was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--kills", type=int, default=25, help="in each mode, of either kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--harms", nargs="*", choices=(*HARMS, "freeze"), default=[])
    parser.add_argument("--deal", choices=("blocks", "queue"), default="blocks")
    parser.add_argument("--width", type=int, default=1, help="numbers in a row; 512: shared memory")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of processes that die"
    )
    options = parser.parse_args(argv)
    for mode in options.mode:
        if mode == "sync" and options.deal == "queue":
            # all make each step together
            continue
        for self_kill in (False, True):
            how = "from inside" if self_kill else "from outside"
            with tempfile.TemporaryDirectory() as folder:
                try:
                    outcome = chaos(
                        Path(folder),
                        mode,
                        options.kills,
                        options.seed,
                        kinds=options.kinds,
                        harms=options.harms,
                        self_kill=self_kill,
                        deal=options.deal,
                        width=options.width,
                    )
                except ChaosError as error:
                    print(error)
                    return 1
            print(f"{mode}, seed {options.seed}, {how}: {outcome}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
