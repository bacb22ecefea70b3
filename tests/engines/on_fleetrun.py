# SPDX-License-Identifier: Apache-2.0
"""Jobs of fleetrun on this machine, by the interface of `running.py`."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from tests.chaos.incarnations import Name
from tests.engines.running import PATIENCE_S, ROOT, JobRequest, poll
from tests.multiprocess.test_dialects import ROLES


def obstacle() -> str | None:
    """Nothing is needed."""
    return None


class LocalJob:
    """A job that is compared with those of engines, and not harmed."""

    def __init__(self, folder: Path, request: JobRequest) -> None:
        folder.mkdir()
        self.folder = folder
        clean = {name: v for name, v in os.environ.items() if not name.startswith(ROLES)}
        with (folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "fleetlight.launch", "--tee", *request.counts),
                    *(str(ROOT / request.script), *request.arguments),
                ],
                cwd=folder,
                env={**clean, "PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def kill(self, name: Name) -> None:
        """`tests.chaos.killing` does so."""
        raise NotImplementedError

    def lose_node_of(self, name: Name) -> Collection[Name]:
        """It has one node."""
        raise NotImplementedError

    def rescale(self, servers: int, workers: int) -> None:
        """It has the counts of its start."""
        raise NotImplementedError

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """fleetrun needs no help."""
        poll(reached, what)

    def end(self) -> None:
        """Its exit code is that of the job."""
        code = self._process.wait(PATIENCE_S)
        assert code == 0, f"fleetrun ended with code {code}"

    def output(self) -> str:
        """What fleetrun has shown."""
        return (self.folder / "output").read_text()

    def terminate(self) -> None:
        """End the job, if it has not ended."""
        self._process.terminate()
        self._process.wait()


class LocalEngine:
    """fleetrun itself."""

    def __init__(self) -> None:
        self.jobs: list[LocalJob] = []

    def start(self, folder: Path, request: JobRequest) -> LocalJob:
        """Start fleetrun."""
        self.jobs.append(LocalJob(folder, request))
        return self.jobs[-1]


@contextlib.contextmanager
def running(folder: Path, starts: int) -> Iterator[LocalEngine]:
    """Its jobs end with the context."""
    engine = LocalEngine()
    try:
        yield engine
    finally:
        for job in engine.jobs:
            job.terminate()
