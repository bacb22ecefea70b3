# SPDX-License-Identifier: Apache-2.0
"""One interface to the jobs of all engines, for programs that harm or compare them."""

import contextlib
import dataclasses
import importlib
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Protocol

from tests.chaos.incarnations import Name

ROOT = Path(__file__).parents[2]
ENGINES = ("jobset", "ray", "slurm")
TOKEN = "0123456789abcdef0123456789abcdef"
LOOK_S = 0.01
PATIENCE_S = 150.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A script with its arguments, and what the job must survive."""

    #: below the root of the repository
    script: str
    arguments: tuple[str, ...] = ()
    #: other files of the repository that the script imports
    modules: tuple[str, ...] = ()
    servers: int = 2
    workers: int = 2
    nodes: int = 2
    #: how often each process may be killed
    restarts: int = 0
    #: how many processes start later, in the place of others or on other counts
    later_starts: int = 0
    #: True when the job saves a checkpoint at a stop
    saves: bool = False

    @property
    def counts(self) -> tuple[str, ...]:
        """The flags of fleetrun with the counts."""
        return ("--server_num", str(self.servers), "--worker_num", str(self.workers))

    @property
    def starts(self) -> int:
        """How many processes start at most."""
        return self.servers + self.workers + self.later_starts


class RunningJob(Protocol):
    """A job that an engine runs."""

    #: where its processes write
    folder: Path

    def kill(self, name: Name) -> None:
        """Kill a process, so that its engine starts it again."""

    def lose_node_of(self, name: Name) -> Collection[Name]:
        """Kill all that runs on the node of a process; returns what starts again afterwards."""

    def rescale(self, servers: int, workers: int) -> None:
        """Stop the job by SIGTERM, and resume what it has saved on other counts."""

    def wait_until(self, reached: Callable[[], bool], what: str) -> None:
        """Let the engine work until a state is reached."""

    def end(self) -> None:
        """Wait for the end of the job; raises if it failed."""

    def output(self) -> str:
        """What its processes have printed so far."""


class RunningEngine(Protocol):
    """An engine on this machine."""

    def start(self, folder: Path, request: JobRequest) -> RunningJob:
        """Start a job that uses this folder alone."""


class EngineHarness(Protocol):
    """The module of an engine in this folder."""

    def obstacle(self) -> str | None:
        """Why the engine cannot run here; None where it can."""

    def running(
        self, folder: Path, starts: int
    ) -> contextlib.AbstractContextManager[RunningEngine]:
        """The engine, for so many starts of processes; it ends with its jobs."""


def harness(engine: str) -> EngineHarness:
    """The harness of an engine, or of fleetrun on this machine."""
    found: EngineHarness = importlib.import_module(f"tests.engines.on_{engine}")
    return found


@contextlib.contextmanager
def started(engine: str, folder: Path, request: JobRequest) -> Iterator[RunningJob]:
    """A job with an engine of its own."""
    with harness(engine).running(folder / "engine", request.starts) as found:
        yield found.start(folder / "job", request)


def poll(reached: Callable[[], bool], what: str) -> None:
    """Wait for a state that an engine reaches without help."""
    end = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(LOOK_S)
