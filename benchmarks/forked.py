# SPDX-License-Identifier: Apache-2.0
"""Many short jobs on this machine: workers are forks of a process that has imported torch once.

Starting an interpreter for each worker of each job would take longer than the jobs themselves.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import Any

from benchmarks import machine
from benchmarks.jobs import BenchmarkError, Run, workers

#: computes one worker's result from its options; both are JSON values
Work = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_GRACE_S = 10.0

_context = multiprocessing.get_context("forkserver")


def preload() -> None:
    """Import modules of workers in the forking process; call it before the first `run`."""
    # torch._dynamo is what the first optimizer of a process imports
    _context.set_forkserver_preload(["torch", "torch._dynamo", "fleetlight.fleet.api"])


def run(
    name: str, work: Work, options: Mapping[str, Any], count: int, deadline_s: float = 600.0
) -> Run:
    """Run `work(options)` in each of `count` workers of one job and return their results."""
    each = [command.environment for command in workers([], count)]
    return run_as(name, work, options, each, deadline_s)


def run_as(
    name: str,
    work: Work,
    options: Mapping[str, Any],
    each: Sequence[Mapping[str, str]],
    deadline_s: float = 600.0,
) -> Run:
    """Run `work` in one process for each environment, which determines its role."""
    # the first call starts the forking server, which inherits this environment
    quiet = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    os.environ.update(quiet)
    with machine.Meter() as meter:
        started = [_started(environment, work, options) for environment in each]
        try:
            found = _answers(name, started, deadline_s)
            for process, _ in started:
                process.join(_GRACE_S)
        finally:
            for process, _ in started:
                process.kill()
                process.join()
    cpu_s = sum(result["cpu_seconds"] for result in found)
    share = machine.foreign_share(meter.wall_s, meter.busy_s, cpu_s)
    return Run(meter.wall_s, cpu_s, share, found)


def _started(
    environment: Mapping[str, str], work: Work, options: Mapping[str, Any]
) -> tuple[Any, connection.Connection]:
    mine, theirs = _context.Pipe(duplex=False)
    arguments = (theirs, dict(environment), work, dict(options))
    process = _context.Process(target=_main, args=arguments)
    process.start()
    theirs.close()
    return process, mine


def _main(
    pipe: connection.Connection,
    environment: Mapping[str, str],
    work: Work,
    options: Mapping[str, Any],
) -> None:
    os.environ.update(environment)
    answer: dict[str, Any]
    try:
        answer = {"result": dict(work(options))}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    pipe.send_bytes(json.dumps(answer).encode())
    pipe.close()


def _answers(
    name: str, started: Sequence[tuple[Any, connection.Connection]], deadline_s: float
) -> list[dict[str, Any]]:
    """The results of the workers; the first error, or the deadline, ends the wait."""
    found: dict[int, dict[str, Any]] = {}
    waiting = {pipe: number for number, (_, pipe) in enumerate(started)}
    while waiting:
        ready = connection.wait(list(waiting), deadline_s)
        if not ready:
            raise BenchmarkError(f"{name}: no result within {deadline_s:g} s")
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            number = waiting.pop(pipe)
            found[number] = _answer(name, number, pipe)
    return [found[number] for number in sorted(found)]


def _answer(name: str, number: int, pipe: connection.Connection) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(pipe.recv_bytes())
    except EOFError:
        raise BenchmarkError(f"{name}: worker {number} exited without a result") from None
    if "error" in answer:
        raise BenchmarkError(f"{name}: worker {number} failed:\n{answer['error']}")
    result: dict[str, Any] = answer["result"]
    return result
