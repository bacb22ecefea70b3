# SPDX-License-Identifier: Apache-2.0
"""One job of a benchmark: starts commands together, times and ends them, reads their results.

Each process that trains prints one line `RESULT {json}` with at least `steps` and `seconds` (and
`cpu_seconds`), on its output or into a log file below the folder it was started in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine

ROOT = Path(__file__).resolve().parent.parent
MARK = "RESULT "
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class BenchmarkError(Exception):
    """A job failed, ran past its deadline or printed no result."""


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of a job, and its additional variables."""

    argv: Sequence[str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Job:
    """Commands started together, which print `results` lines with results."""

    name: str
    commands: Sequence[Command]
    results: int = 2
    deadline_s: float = 600.0


@dataclasses.dataclass(frozen=True)
class Run:
    """One job from its first start to its last exit."""

    wall_s: float
    cpu_s: float
    foreign: float | None
    results: list[dict[str, Any]]

    @property
    def rate(self) -> float:
        """Steps per second of the slowest process."""
        return float(min(result["steps"] / result["seconds"] for result in self.results))

    @property
    def cpu_ms(self) -> float:
        """CPU milliseconds of a step in one process, on average."""
        spent = [1e3 * r.get("cpu_seconds", 0.0) / r["steps"] for r in self.results]
        return float(sum(spent) / len(spent))


def result(**facts: Any) -> None:
    """Print the line with the measurement of a job's process."""
    print(MARK + json.dumps(facts), flush=True)


def workers(argv: Sequence[str], count: int = 2) -> list[Command]:
    """`count` workers of one job on this machine, with torchrun's variables."""
    common = {
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    return [
        Command(argv, {key: str(v) for key, v in {**common, "RANK": i, "LOCAL_RANK": i}.items()})
        for i in range(count)
    ]


def fleet(
    argv: Sequence[str], servers: int, workers: int, host: str = "127.0.0.1"
) -> list[Command]:
    """Servers and workers of one job, the servers first, with the variables of fleetrun."""
    common: dict[str, object] = {
        "FLEET_SERVER_NUM": servers,
        "FLEET_WORKER_NUM": workers,
        "FLEET_SERVER_ENDPOINTS": ",".join(f"{host}:{free_port()}" for _ in range(servers)),
        "FLEET_MASTER": f"{host}:{free_port()}",
        "FLEET_DEADLINE_S": 120,
        # workers write to this folder, too
        "FLEET_JOB": "benchmark",
    }
    roles = [("server", i) for i in range(servers)] + [("worker", i) for i in range(workers)]
    own = [common | {"FLEET_ROLE": kind, "FLEET_INDEX": index} for kind, index in roles]
    return [Command(argv, {key: str(value) for key, value in one.items()}) for one in own]


def launcher() -> list[str]:
    """The installed command, or the module if it is not installed."""
    command = Path(sys.executable).with_name("fleetrun")
    return [str(command)] if command.exists() else [sys.executable, "-m", "fleetlight.launch"]


def check_same(run: Run, what: str, tolerance: float = 0.0) -> None:
    """Refuse a run whose workers do not end with the same."""
    first, *others = (result[what] for result in run.results)
    if any(abs(other - first) > tolerance * abs(first) for other in others if first is not None):
        raise BenchmarkError(f"the workers' {what} differ: {[r[what] for r in run.results]}")


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def ending_at_sigterm() -> Iterator[None]:
    """Inside the block SIGTERM raises an error, so that the processes of a job are ended."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(job: Job) -> Run:
    """Run a job once, in an empty folder, each process on one thread."""
    with tempfile.TemporaryDirectory() as name:
        folder, cpu = Path(name), children_cpu_s()
        with ending_at_sigterm(), machine.Meter() as meter:
            _finish(job, start(job, folder), folder)
        found = _results(folder)
        if len(found) != job.results:
            raise BenchmarkError(
                f"{job.name}: got {len(found)} {MARK}lines, expected {job.results}; "
                f"its output ends:\n{tail(folder)}"
            )
    cpu = children_cpu_s() - cpu
    return Run(meter.wall_s, cpu, meter.foreign(cpu), found)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The variables of every process: one thread, and this package on its path."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **THREADS, "PYTHONPATH": path, **extra}


def start(job: Job, folder: Path) -> list[subprocess.Popen[bytes]]:
    """Start the processes of a job in `folder`."""
    started = []
    for index, command in enumerate(job.commands):
        with (folder / f"process{index}.log").open("wb") as out:
            started.append(
                subprocess.Popen(
                    command.argv,
                    cwd=folder,
                    env=environment(command.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return started


def _finish(job: Job, processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait for every process; the first failure or the deadline ends them all."""
    end, wrong = time.monotonic() + job.deadline_s, ""
    try:
        while not wrong:
            running = any(process.poll() is None for process in processes)
            failed = next((process for process in processes if process.returncode), None)
            if failed:
                command = shlex.join(map(str, failed.args))  # type: ignore[arg-type]
                wrong = f"exit code {failed.returncode} of `{command}`"
            elif not running:
                break
            elif time.monotonic() > end:
                wrong = f"not finished after {job.deadline_s:g} s"
            time.sleep(0.005)
    finally:
        _stop(processes)
    if wrong:
        raise BenchmarkError(f"{job.name}: {wrong}; it ends:\n{tail(folder)}")


def _stop(processes: Sequence[subprocess.Popen[bytes]], grace_s: float = 10.0) -> None:
    """End running processes: SIGTERM first, because a launcher then ends its children."""
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        process.terminate()
    for process in alive:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _results(folder: Path) -> list[dict[str, Any]]:
    texts = [path.read_text(errors="replace") for path in _logs(folder)]
    lines = (line for text in texts for line in text.splitlines())
    # A launcher may show a worker's line and keep it in a log too: the same line counts once.
    found = dict.fromkeys(line[len(MARK) :] for line in lines if line.startswith(MARK))
    return [json.loads(text) for text in found]


def _logs(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*log*")) if path.is_file()]


def tail(folder: Path, lines: int = 15) -> str:
    """The last lines of the logs of a job."""
    parts = []
    for path in _logs(folder):
        last = path.read_text(errors="replace").splitlines()[-lines:]
        parts += [f"--- {path.relative_to(folder)}", *last]
    return "\n".join(parts)


def children_cpu_s() -> float:
    """CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
