# SPDX-License-Identifier: Apache-2.0
"""Marks of tests on a rig, and jobs whose processes are on its hosts."""

import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from rig.hosts import Rig
from tests.workers import run_processes

from rig import spaces

_OBSTACLE = spaces.obstacle()
_PORT = 6170

#: marks of tests that need a rig
NEEDED = [
    pytest.mark.long,
    pytest.mark.netns,
    pytest.mark.multiprocess,
    pytest.mark.skipif(_OBSTACLE is not None, reason=f"{_OBSTACLE}"),
]


def run_on(
    rig: Rig,
    places: Sequence[int],
    function: Callable[..., Any],
    *args: Any,
    deadline_s: float = 20.0,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] = types.MappingProxyType({}),
) -> list[Any]:
    """Call `function(*args)` in worker i on host `places[i]`, after `fleet.init`.

    Worker 0 serves the store, so its host is the master. `env` has further variables for all
    workers, or is a function from a worker's index to its variables.
    """
    each = [
        _placed(rig, places[0], place, function, args, dict(env(i) if callable(env) else env))
        for i, place in enumerate(places)
    ]
    return run_processes(_on_host, each, deadline_s=deadline_s)


def serve_on(
    rig: Rig,
    servers: Sequence[int],
    workers: Sequence[int],
    server: Callable[[], Any],
    worker: Callable[[], Any],
) -> list[Any]:
    """Run a job with parameter servers on these hosts; returns the results of all processes."""
    ports = range(_PORT + 1, _PORT + 1 + len(servers))
    endpoints = [f"{rig.hosts[at].address}:{port}" for at, port in zip(servers, ports, strict=True)]
    job = {
        "FLEET_SERVER_NUM": str(len(servers)),
        "FLEET_SERVER_ENDPOINTS": ",".join(endpoints),
        "FLEET_WORKER_NUM": str(len(workers)),
    }
    each = [
        _placed(rig, workers[0], place, function, (), {**job, **_identity(kind, index)})
        for kind, places, function in (("server", servers, server), ("worker", workers, worker))
        for index, place in enumerate(places)
    ]
    return run_processes(_on_host, each)


def _identity(kind: str, index: int) -> dict[str, str]:
    return {"FLEET_ROLE": kind, "FLEET_INDEX": str(index)}


def _placed(
    rig: Rig,
    master: int,
    place: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    env: dict[str, str],
) -> tuple[Any, ...]:
    """The environment of a process."""
    # no other program runs on these hosts, so any port is free
    env = {"FLEET_MASTER": f"{rig.hosts[master].address}:{_PORT}", **env}
    return rig.hosts[place].name, function, args, env


def _on_host(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str]
) -> Any:
    spaces.enter(name)
    os.environ.update(env)
    import fleetlight as fleet

    served = "FLEET_SERVER_NUM" in env
    fleet.init(is_collective=not served)
    value = function(*args)
    if not served:
        fleet.stop_worker()
    return value
