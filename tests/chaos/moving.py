# SPDX-License-Identifier: Apache-2.0
"""An engine without fleetrun: it kills members of a job, and starts them at other addresses.

python -m tests.chaos.moving --mode async --kills 50 --seed 1
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.chaos import killing
from tests.chaos.incarnations import KINDS, MEMBERS, Name, at_work
from tests.workers import reserved_port

SCHEDULER: Name = ("scheduler", 0)


class Engine:
    """The processes of a job, each of which gets a new address at each start."""

    def __init__(self, folder: Path, mode: str, seed: int) -> None:
        self._folder = folder
        self._command = [sys.executable, str(killing.SCRIPT), "--mode", mode, "--seed", str(seed)]
        self._starts = 0
        self._running: dict[Name, subprocess.Popen[bytes]] = {}
        self._output = (folder / "output").open("ab")
        self._holder, port = reserved_port()
        self._common = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FLEET_")},
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": killing.paths(),
            "FLEET_JOB": "moving",
            "FLEET_TOKEN": "0123456789abcdef",
            "FLEET_WORKER_NUM": str(KINDS["worker"]),
            "FLEET_SERVER_NUM": str(KINDS["server"]),
            "FLEET_SCHEDULER_NUM": "1",
            "FLEET_MASTER": f"127.0.0.1:{port}",
        }

    def __enter__(self) -> Engine:
        for name in (*MEMBERS, SCHEDULER):
            self.start(name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
        self._output.close()
        self._holder.close()

    def start(self, name: Name) -> None:
        """Start a member at an address that no member had before."""
        self._starts += 1
        kind, number = name
        role = {"FLEET_ROLE": kind, "FLEET_INDEX": str(number)}
        address = f"127.0.{self._starts // 250}.{2 + self._starts % 250}"
        self._running[name] = subprocess.Popen(
            self._command,
            cwd=self._folder,
            env={**self._common, **role, "FLEET_HOST": address},
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def restart(self, name: Name) -> float:
        """Kill a member and start it again; the seconds until it is at work."""
        before = self._pid(name)
        process = self._running[name]
        process.kill()
        process.wait()
        began = time.monotonic()
        self.start(name)
        if name == SCHEDULER:
            return 0.0
        self.wait_at_work(name, before)
        return time.monotonic() - began

    def wait_at_work(self, name: Name, before: int = 0) -> None:
        """Wait until another process than before is at work."""
        end = time.monotonic() + killing.PATIENCE_S
        while self._pid(name) in (0, before):
            for other, process in self._running.items():
                if process.poll():
                    raise killing.ChaosError(f"{other} ended with code {process.returncode}")
            if time.monotonic() > end:
                raise killing.ChaosError(f"{name} did not come (back)")
            time.sleep(0.01)

    def _pid(self, name: Name) -> int:
        found = at_work(self._folder, name)
        return 0 if found is None else found.pid

    def wait(self) -> list[int]:
        """Wait for the end of the job; the exit codes."""
        (self._folder / "enough").touch()
        return [process.wait(killing.PATIENCE_S) for process in self._running.values()]


def moved(folder: Path, mode: str, kills: int, seed: int) -> killing.Outcome:
    """Run a job, and kill and move its members so many times; the scheduler dies, too."""
    chance, away_s = random.Random(seed), []
    try:
        with Engine(folder, mode, seed) as engine:
            for name in MEMBERS:
                engine.wait_at_work(name)
            for kill in range(kills):
                time.sleep(chance.uniform(0, killing.SPREAD_S))
                if kill % 10 == 9:
                    engine.restart(SCHEDULER)
                away_s.append(engine.restart(chance.choice(MEMBERS)))
            codes = engine.wait()
    except (killing.ChaosError, subprocess.TimeoutExpired) as error:
        raise killing.ChaosError(
            f"{mode}, seed {seed}: {error}\n{killing.end_of(folder)}"
        ) from error
    return killing.outcome_of(folder, f"{mode}, seed {seed}", codes, away_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Kill as often as requested; returns 1 if a count was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mode", nargs="+", choices=killing.MODES, default=killing.MODES)
    parser.add_argument("--kills", type=int, default=12, help="in each mode")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    for mode in options.mode:
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcome = moved(Path(folder), mode, options.kills, options.seed)
            except killing.ChaosError as error:
                print(error)
                return 1
        print(f"{mode}, seed {options.seed}, to other addresses: {outcome}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
