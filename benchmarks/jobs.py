# SPDX-License-Identifier: Apache-2.0
"""One job of a benchmark: starts commands together, times and ends them, reads their results.

Each process that trains prints one line `RESULT {json}` with at least `steps` and `seconds` (and
`cpu_seconds`), on its output or into a log file below the folder it was started in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from multiprocessing import connection
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
    with futures.ThreadPoolExecutor(len(processes)) as pool:
        # A thread per process: waitpid returns at once, Popen.wait(timeout) only every 50 ms.
        ends = [pool.submit(_ended_well, process) for process in processes]
        try:
            _, late = futures.wait(ends, job.deadline_s, futures.FIRST_EXCEPTION)
        finally:
            failed = [end for end in ends if end.done() and end.exception()]
            _stop(processes)
    if failed:
        raise BenchmarkError(f"{job.name}: {failed[0].exception()}; it ends:\n{tail(folder)}")
    if late:
        raise BenchmarkError(
            f"{job.name}: not finished after {job.deadline_s:g} s; it ends:\n{tail(folder)}"
        )


def _ended_well(process: subprocess.Popen[bytes]) -> None:
    code = process.wait()
    if code:
        raise BenchmarkError(f"exit code {code} of `{shlex.join(map(str, process.args))}`")  # type: ignore[arg-type]


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


# -- many short jobs: starting an interpreter for each worker would take longer than the job

#: computes one worker's result from its options; both are JSON values
Work = Callable[[Mapping[str, Any]], Mapping[str, Any]]
_forking = multiprocessing.get_context("forkserver")


def run_forked(
    name: str, work: Work, options: Mapping[str, Any], each: Sequence[Command], deadline_s: float
) -> Run:
    """Run `work(options)` in a fork with the variables of each command.

    Forks come from a process that has imported torch once.
    """
    # torch._dynamo is what the first optimizer of a process imports
    _forking.set_forkserver_preload(["torch", "torch._dynamo", "fleetlight.fleet.api"])
    # the first call starts the forking server, which inherits this environment
    os.environ.update(THREADS, TORCH_CPP_LOG_LEVEL="ERROR")
    with machine.Meter() as meter:
        pipes, processes = [], []
        for command in each:
            mine, theirs = _forking.Pipe(duplex=False)
            arguments = (theirs, dict(command.environment), work, dict(options))
            processes.append(_forking.Process(target=_forked, args=arguments))
            processes[-1].start()
            theirs.close()
            pipes.append(mine)
        try:
            found = _answers(name, pipes, deadline_s)
            for process in processes:
                process.join(10.0)
        finally:
            for process in processes:
                process.kill()
                process.join()
    cpu_s = sum(result["cpu_seconds"] for result in found)
    return Run(meter.wall_s, cpu_s, meter.foreign(cpu_s), found)


def _forked(pipe: Any, variables: Mapping[str, str], work: Work, options: Any) -> None:
    os.environ.update(variables)
    try:
        answer: Any = {"result": dict(work(options))}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    pipe.send_bytes(json.dumps(answer).encode())
    pipe.close()


def _answers(name: str, pipes: Sequence[Any], deadline_s: float) -> list[dict[str, Any]]:
    """The results of the workers; the first error, or the deadline, ends the wait."""
    found: dict[int, dict[str, Any]] = {}
    while len(found) < len(pipes):
        waiting = [pipe for number, pipe in enumerate(pipes) if number not in found]
        ready = connection.wait(waiting, deadline_s)
        if not ready:
            raise BenchmarkError(f"{name}: no result within {deadline_s:g} s")
        for pipe in ready:
            number = pipes.index(pipe)
            try:
                answer = json.loads(pipes[number].recv_bytes())
            except EOFError:
                answer = {"error": "it exited without a result"}
            if "error" in answer:
                raise BenchmarkError(f"{name}: worker {number} failed:\n{answer['error']}")
            found[number] = answer["result"]
    return [found[number] for number in range(len(pipes))]
