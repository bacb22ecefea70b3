# SPDX-License-Identifier: Apache-2.0
"""Runs a function in several worker processes that form a job.

The processes are forked from a server that has imported torch once, so that a test with two
workers takes a fraction of a second.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from typing import Any

_context = multiprocessing.get_context("forkserver")
# modules that programs, tables, kernels and tests import at their first use
_context.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.export._trace", "torch.utils.checkpoint"),
        *("torch.distributed.tensor", "torch.profiler._cupti_monitor", "torch._inductor.sizevars"),
        *("sympy.tensor.tensor", "encodings.idna", "numpy.ma", "numba.np.arrayobj"),
        *("pytest", "hypothesis.strategies"),
        *("fleetlight.fleet.api", "fleetlight.fleet.bootstrap", "fleetlight.data.public"),
        "fleetlight.fleet.collective.programs",
        *("fleetlight.static.executor", "fleetlight.static.capturing"),
    ]
)

#: below the limit of a test; a job that exports a program needs most of it on a busy machine
LIMIT_S = 100.0


class WorkerFailedError(AssertionError):
    """At least one worker raised; the text has its traceback."""


def reserved_port() -> tuple[socket.socket, int]:
    """A loopback port that no other process gets while the socket is open."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder, int(holder.getsockname()[1])


def environment(index: int, workers: int, port: int, deadline_s: float = 20.0) -> dict[str, str]:
    """The variables that a launcher sets for a worker."""
    return {
        "FLEET_ROLE": "worker",
        "FLEET_INDEX": str(index),
        "FLEET_WORKER_NUM": str(workers),
        "FLEET_MASTER": f"127.0.0.1:{port}",
        "FLEET_DEADLINE_S": str(deadline_s),
        "OMP_NUM_THREADS": "1",
    }


def descend(optimizer: Any, loss: Any) -> None:
    """Clear the gradients, compute those of the loss and step, as a script does."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def run_workers(
    function: Callable[..., Any], workers: int = 2, *args: Any, deadline_s: float = 20.0
) -> list[Any]:
    """Call `function(*args)` in each worker after `fleet.init`; returns the results."""
    return run_processes(_in_job, [(function, args)] * workers, deadline_s=deadline_s)


def run_processes(
    function: Callable[..., Any], each: list[tuple[Any, ...]], deadline_s: float = 20.0
) -> list[Any]:
    """Call `function(*each[i])` in process i with the environment of worker i."""
    holder, port = reserved_port()
    running = [
        _started(environment(index, len(each), port, deadline_s), function, args)
        for index, args in enumerate(each)
    ]
    results = _results(running)
    holder.close()
    errors = [text for kind, text in results if kind == "error"]
    if errors:
        raise WorkerFailedError("\n".join(errors))
    return [value for _, value in results]


def run_job(
    server: Callable[[], Any],
    worker: Callable[[], Any],
    *,
    servers: int = 2,
    workers: int = 2,
    deadline_s: float = 20.0,
) -> list[tuple[str, Any]]:
    """Run a job with parameter servers; ("value", result) or ("error", traceback) of each process.

    The servers come first. Each function is called after `fleet.init` and leaves the job itself.
    """
    held = [reserved_port() for _ in range(servers + 1)]
    endpoints = ",".join(f"127.0.0.1:{port}" for _, port in held[1:])
    job = {"FLEET_SERVER_NUM": str(servers), "FLEET_SERVER_ENDPOINTS": endpoints}
    roles = [("server", n) for n in range(servers)] + [("worker", n) for n in range(workers)]
    running = []
    for kind, index in roles:
        env = environment(index, workers, held[0][1], deadline_s) | job | {"FLEET_ROLE": kind}
        args = (server if kind == "server" else worker,)
        running.append(_started(env, _in_served_job, args))
    results = _results(running)
    for holder, _ in held:
        holder.close()
    return results


def _in_served_job(function: Callable[[], Any]) -> Any:
    import fleetlight as fleet

    fleet.init()
    return function()


def _started(env: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    mine, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_main, args=(theirs, env, function, args), daemon=False)
    process.start()
    theirs.close()
    return process, mine


def _results(running: list[Any]) -> list[tuple[str, Any]]:
    try:
        return [_result(index, pipe) for index, (_, pipe) in enumerate(running)]
    finally:
        for process, pipe in running:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
            pipe.close()


def _result(index: int, pipe: Any) -> tuple[str, Any]:
    try:
        if pipe.poll(LIMIT_S):
            result: tuple[str, Any] = pickle.loads(pipe.recv_bytes())
            return result
    except EOFError:
        return "error", f"worker {index} died without a result"
    return "error", f"worker {index} gave no result within {LIMIT_S} s"


def _main(
    pipe: Any, env: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    # modules of the forkserver are no garbage, and a collection would copy their memory
    gc.freeze()
    # else loaders with processes start a second server, which imports everything again
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(env)
    import torch

    torch.set_num_threads(1)
    try:
        # plain pickle: torch's pickler would share memory with a process that is about to end
        pipe.send_bytes(pickle.dumps(("value", function(*args))))
    except BaseException:
        text = f"{env['FLEET_ROLE']} {env['FLEET_INDEX']}:\n{traceback.format_exc()}"
        pipe.send_bytes(pickle.dumps(("error", text)))
    pipe.close()
    # as at the end of a script; failures are already reported
    os._exit(0)


def _in_job(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    import fleetlight as fleet

    fleet.init(is_collective=True)
    value = function(*args)
    fleet.stop_worker()
    return value
