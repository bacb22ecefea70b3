# SPDX-License-Identifier: Apache-2.0
"""The backends that run a `JobSpec`: each module of this package has one, as `BACKEND`.

`processes` (this machine) and `hosts` (a few machines that flags name) start processes
themselves, by `session.py`, from the `MachineSpec` in the job. `fleetlight ps`, `logs` and `stop`
know their jobs by the log folder (`backends/processes/control.py`). An engine
(`chooses_machines`) reads only the settings of the whole job. `ray.py` submits a Ray job, whose
driver is `fleetlight/ray.py`: it keeps the rendezvous and starts an actor for each process.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.screen import Screen


@dataclasses.dataclass(frozen=True)
class MemberState:
    """One process of a job, as its backend sees it."""

    #: `worker 1`
    name: str
    #: the backend's own word, such as RUNNING
    state: str
    #: the machine; "" if there is none
    where: str = ""
    #: what else the backend says, such as an exit code
    detail: str = ""
    #: True if the process has ended, and the job does not start it again
    is_over: bool = False


class JobControl(Protocol):
    """What `fleetlight ps`, `logs`, `stop` and `scale` ask about a job, by its id."""

    def status(self, job_id: str) -> Sequence[MemberState]:
        """The processes of a job."""

    def logs(self, job_id: str, member: str | None, start: int = 0) -> Iterator[bytes]:
        """What the processes have printed so far, or one of them, such as `worker 1`.

        `start`: how many bytes of this one are left out.
        """

    def stop(self, job_id: str) -> None:
        """End the job; a job with a checkpoint folder saves first."""

    def scale(self, job_id: str, counts: Mapping[str, int]) -> str:
        """Change the number of workers or servers; returns the id of the job from then on."""


class Engine(JobControl, Protocol):
    """A system that places, starts and restarts processes on its machines.

    A job has the id that `submit` returns.
    """

    def emit(self, job: JobSpec) -> str:
        """Exactly what `submit` hands to the engine, without secrets."""

    def submit(self, job: JobSpec) -> str:
        """Start the job; returns its id."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to run a job."""

    #: runs the job to its end; returns the exit code of fleetrun
    run: Callable[[JobSpec, Screen], int]
    #: True if the backend decides where processes run: counts are then those of the whole job,
    #: and flags that name machines are refused
    chooses_machines: bool = False
    #: False if processes have files of their own: paths of the command are then not those here
    shares_files: bool = True
    #: what `fleetrun` submits jobs to; None: `run` starts the processes
    engine: Engine | None = None
    #: what `fleetlight ps`, `logs`, `stop` and `scale` ask; None: they do not know these jobs
    control: JobControl | None = None


def on_engine(name: str, engine: Engine, *, shares_files: bool = True) -> Backend:
    """The backend that submits jobs to an engine, and does not wait for their end."""

    def run(job: JobSpec, screen: Screen) -> int:
        job_id = engine.submit(job)
        screen.say(f"submitted {name}:{job_id}; see fleetlight ps {name}:{job_id}")
        return 0

    return Backend(
        run=run, chooses_machines=True, shares_files=shares_files, engine=engine, control=engine
    )


def names() -> list[str]:
    """The names of all backends."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def named(name: str) -> Backend:
    """The backend with this name."""
    if name not in names():
        raise ConfigError(f"--on {name}: no such backend; {did_you_mean(name, names())}")
    found = importlib.import_module(f"{__name__}.{name}").BACKEND
    assert isinstance(found, Backend)
    return found


def default_for(job: JobSpec) -> Backend:
    """`hosts` if the flags name several machines, else `processes`."""
    return named("processes" if job.machine.rendezvous is None else "hosts")
