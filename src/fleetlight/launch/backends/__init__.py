# SPDX-License-Identifier: Apache-2.0
"""The backends that run a `JobSpec`: each module of this package has one, as `BACKEND`."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable

from fleetlight.errors import ConfigError, did_you_mean
from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.screen import Screen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """One way to run a job."""

    #: runs the job to its end; returns the exit code of fleetrun
    run: Callable[[JobSpec, Screen], int]
    #: True if the backend decides where processes run: counts are then those of the whole job,
    #: and flags that name machines are refused
    chooses_machines: bool = False


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
