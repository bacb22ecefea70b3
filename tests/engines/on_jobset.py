# SPDX-License-Identifier: Apache-2.0
"""JobSets that `jobset.py` interprets, by the interface of `running.py`."""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from tests.chaos.incarnations import Name
from tests.engines import container
from tests.engines.jobset import Cluster, RunningJobSet, cluster
from tests.engines.manifests import manifest
from tests.engines.running import PATIENCE_S, ROOT, TOKEN, JobRequest

from rig import spaces

#: where the script finds its modules, and the image Fleetlight
_PATH = ("--env", "PYTHONPATH=/job:/usr/local/image/src", "--env", "XDG_CACHE_HOME=/kernels")


def obstacle() -> str | None:
    """Why no pod can run here; None where one can."""
    return spaces.obstacle() or container.obstacle()


class PodsJob:
    """A pod is the node of its process."""

    def __init__(self, where: Cluster, request: JobRequest, name: str) -> None:
        self._where, self._request, self._name, self._uid = where, request, name, 0
        where.claim(f"{name}-saved")
        self.folder = where.claim(name)
        for file in (request.script, *request.modules):
            place = self.folder / file
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, place)
        self._earlier = ""
        self._job = self._created()

    def kill(self, name: Name) -> None:
        """Kill a pod; another one with another address replaces it."""
        self._job.pod(f"{name[0]} {name[1]}").kill()

    def lose_node_of(self, name: Name) -> Collection[Name]:
        """Kill its pod, which is all that runs there."""
        self.kill(name)
        return [name]

    def rescale(self, servers: int, workers: int) -> None:
        """Delete the JobSet, whose pods save, and create another one."""
        codes = self._job.delete()
        assert {code for name, code in codes.items() if name.startswith("worker")} == {75}, codes
        self._earlier += self._job.logs()
        self._request = dataclasses.replace(self._request, servers=servers, workers=workers)
        self._job = self._created("--resume")

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """The controllers work meanwhile."""
        self._job.run_until(reached, PATIENCE_S)

    def end(self) -> None:
        """It completes, and was never started again as a whole."""
        assert (self._job.run_to_end(), self._job.restarts) == ("Completed", 0)

    def output(self) -> str:
        """The logs of all pods."""
        return self._earlier + self._job.logs()

    def _created(self, *words: str) -> RunningJobSet:
        request, self._uid = self._request, self._uid + 1
        flags = [*request.counts, "--max_restarts", str(request.restarts), *_PATH, *words]
        if request.saves:
            flags += ["--checkpoint", "saved", "--option", f"checkpoint_claim={self._name}-saved"]
        else:
            flags += ["--option", "journal_size=1Gi"]
        mounts = f"{self._name}:/job,kernels:/kernels"
        text = manifest(*flags, request.script, *request.arguments, name=self._name, mounts=mounts)
        return RunningJobSet(text, self._where, {"token": TOKEN}, uid=f"{self._name}-{self._uid}")


class PodsEngine:
    """A cluster; each pod has a host of its own."""

    def __init__(self, where: Cluster) -> None:
        self._where, self._jobs = where, 0

    def start(self, folder: Path, request: JobRequest) -> PodsJob:
        """Create a JobSet whose files are on claims of its own; the folder stays unused."""
        self._jobs += 1
        return PodsJob(self._where, request, f"t{self._jobs}")


@contextlib.contextmanager
def running(folder: Path, starts: int) -> Iterator[PodsEngine]:
    """Its pods end with the context."""
    folder.mkdir()
    with cluster(starts, folder) as where:
        where.claim("kernels")
        yield PodsEngine(where)
