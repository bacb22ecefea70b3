# SPDX-License-Identifier: Apache-2.0
"""Jobs on Ray, by the interface of `running.py`."""

import contextlib
import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from tests.chaos.incarnations import MEMBERS, Name
from tests.engines.running import PATIENCE_S, ROOT, JobRequest, poll

from fleetlight.launch.backends.ray import spec_to_json
from fleetlight.launch.job.spec import JobSpec, RoleSpec
from fleetlight.roles.role import Kind

NODES = 4
_VARIABLES = {"RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}


def obstacle() -> str | None:
    """Why no Ray can be started here; None where one can."""
    return None if importlib.util.find_spec("ray") else "Ray is not installed (fleetlight[ray])"


class RayJob:
    """The driver is a process of its own, as in a Ray job."""

    def __init__(self, folder: Path, cluster: Any, request: JobRequest) -> None:
        self.folder, self._cluster, self._request = folder, cluster, request
        self._number = 0
        self._driver = self._start()

    def kill(self, name: Name) -> None:
        """Kill the process of an actor, with which its child ends; Ray starts the actor again."""
        os.kill(self._actors()[name].pid, signal.SIGKILL)

    def lose_node_of(self, name: Name) -> Collection[Name]:
        """Kill a node with its actors; another node takes its place."""
        from tests.engines.ray_nodes import add_node

        actors = self._actors()
        lost = actors[name].node_id
        [node] = [one for one in self._cluster.worker_nodes if one.node_id == lost]
        self._cluster.remove_node(node, allow_graceful=False)
        add_node(self._cluster)
        return [other for other, actor in actors.items() if actor.node_id == lost]

    def rescale(self, servers: int, workers: int) -> None:
        """Stop the driver, and start another one."""
        self._driver.terminate()
        code = self._driver.wait(PATIENCE_S)
        assert code == 75, f"the driver ended with code {code}\n{self.output()}"
        self._request = dataclasses.replace(self._request, servers=servers, workers=workers)
        self._driver = self._start()

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Ray needs no help."""
        poll(lambda: reached() or self._driver.poll() is not None, what)
        assert reached(), f"the driver ended with code {self._driver.poll()}"

    def end(self) -> None:
        """The driver reports the end of all processes."""
        code = self._driver.wait(PATIENCE_S)
        assert code == 0, f"the driver ended with code {code}"

    def output(self) -> str:
        """The output of the driver, to which Ray adds that of the actors."""
        return (self.folder / "driver").read_text()

    def kill_driver(self) -> None:
        """End the job, if it has not ended."""
        self._driver.kill()
        self._driver.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        request, self._number = self._request, self._number + 1
        job = JobSpec(
            script=str(ROOT / request.script),
            arguments=request.arguments,
            collective=False,
            worker=RoleSpec(kind=Kind.WORKER, count=request.workers),
            server=RoleSpec(kind=Kind.SERVER, count=request.servers),
            max_restarts=request.restarts,
            checkpoint=str(self.folder / "saved") if request.saves else None,
            resume=self._number > 1,
        )
        own = {"RAY_ADDRESS": self._cluster.address, "FLEET_JOB": self._name}
        with (self.folder / "driver").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "fleetlight.ray", spec_to_json(job).decode()],
                cwd=self.folder,
                env={**os.environ, **_VARIABLES, **own},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def _name(self) -> str:
        return f"job{self._number}"

    def _actors(self) -> dict[Name, Any]:
        from ray.util.state import list_actors

        found = {actor.name: actor for actor in list_actors(filters=[("state", "=", "ALIVE")])}
        return {name: found[f"{self._name} {name[0]} {name[1]}"] for name in MEMBERS}


class RayEngine:
    """A cluster of nodes with an address each."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.jobs: list[RayJob] = []

    def start(self, folder: Path, request: JobRequest) -> RayJob:
        """Start the driver of a job."""
        folder.mkdir()
        self.jobs.append(RayJob(folder, self._cluster, request))
        return self.jobs[-1]


@contextlib.contextmanager
def running(folder: Path, starts: int) -> Iterator[RayEngine]:
    """The cluster has room for one job on the nodes that a lost one leaves."""
    from tests.engines.ray_nodes import nodes

    # nodes pass their environment to actors
    os.environ.update(_VARIABLES)
    with nodes(NODES) as cluster:
        engine = RayEngine(cluster)
        try:
            yield engine
        finally:
            for job in engine.jobs:
                job.kill_driver()
