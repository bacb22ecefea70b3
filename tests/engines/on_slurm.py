# SPDX-License-Identifier: Apache-2.0
"""Jobs on Slurm, by the interface of `running.py`."""

import contextlib
import os
import re
import signal
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from tests.chaos.incarnations import MEMBERS, Name, at_work
from tests.engines.cluster import Cluster, cluster, obstacle, wait_until
from tests.engines.login import Login
from tests.engines.running import ROOT, JobRequest, poll

from rig import spaces

__all__ = ["obstacle", "running"]
NODES = 4


class SlurmJob:
    """A batch job; a lost node starts all of it again elsewhere."""

    def __init__(self, login: Login, job: str) -> None:
        self.folder, self._login, self._job = login.folder, login, job
        self._earlier = ""

    def kill(self, name: Name) -> None:
        """Kill the process of a task; `fleetlight member` starts it again in place."""
        os.kill(self._pid(name), signal.SIGKILL)

    def lose_node_of(self, name: Name) -> Collection[Name]:
        """Kill slurmd and all other processes of the node; another slurmd starts afterwards."""
        slurm, pid = self._login.slurm, self._pid(name)
        [number] = [node.number for node in slurm.nodes if pid in spaces.inhabitants(node.name)]
        slurm.lose_node(number)
        self._login.start_again(self._job)
        self._wait_for("RUNNING")
        slurm.start_node(number)
        return MEMBERS

    def rescale(self, servers: int, workers: int) -> None:
        """The job saves, requeues itself as at its time limit, and another one resumes it."""
        self._login.slurm.ask("scancel", "--signal=TERM", self._job)
        self._wait_for("PENDING")
        self._earlier = self.output()
        words = ("--server_num", str(servers), "--worker_num", str(workers))
        found = re.search(r"scaling: slurm:(\d+)", self._login.tool("scale", self._job, *words))
        assert found is not None
        self._job = found[1]

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Slurm needs no help."""
        poll(reached, what)

    def end(self) -> None:
        """It completes."""
        self._login.wait_for_end(self._job)

    def output(self) -> str:
        """The logs of all processes."""
        return self._earlier + self._login.tool("logs", self._job)

    def _wait_for(self, state: str) -> None:
        facts = self._login.slurm.job
        wait_until(lambda: facts(self._job)["JobState"] == state, f"job {self._job} is {state}")

    def _pid(self, name: Name) -> int:
        found = at_work(self.folder, name)
        assert found is not None
        return found.pid


class SlurmEngine:
    """A cluster of four nodes."""

    def __init__(self, slurm: Cluster) -> None:
        self._slurm = slurm

    def start(self, folder: Path, request: JobRequest) -> SlurmJob:
        """Submit a job."""
        flags = ["--max_restarts", str(request.restarts), "--option", f"nodes={request.nodes}"]
        flags += ["--checkpoint", "saved"] if request.saves else []
        login, script = Login(self._slurm, folder), str(ROOT / request.script)
        job = login.submit(script, *request.arguments, counts=request.counts, flags=tuple(flags))
        return SlurmJob(login, job)


@contextlib.contextmanager
def running(folder: Path, starts: int) -> Iterator[SlurmEngine]:
    """Its daemons end with the context."""
    folder.mkdir()
    with cluster(folder, NODES) as slurm:
        yield SlurmEngine(slurm)
