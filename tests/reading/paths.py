# SPDX-License-Identifier: Apache-2.0
"""The traced paths: what each is, and the job that takes it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Path:
    """One way through the package, from a call to its end."""

    about: str
    #: the job of `jobs.py` that opens a window for it
    job: str
    #: without the functions of this path
    over: str = ""


PATHS = {
    "fleet_init": Path("import fleetlight and fleet.init() of a process alone", "embedded"),
    "step_embedded": Path("forward to zero_grad, sync, the server in the process", "embedded"),
    "optimizer_embedded": Path("its optimizer.step() alone", "embedded"),
    "iteration_embedded": Path("the same step, and the batch from its loader", "embedded"),
    "step_sockets": Path("forward to zero_grad, sync, a worker and a server", "sockets"),
    "optimizer_sockets": Path("its optimizer.step() alone", "sockets"),
    "iteration_sockets": Path("the same step, and the batch from its loader", "sockets"),
    "pull": Path("a forward whose rows are on a server", "sockets"),
    "save_served": Path("fleet.save_persistables, a worker and a server", "sockets"),
    "step_collective": Path("forward to zero_grad, two workers", "collective"),
    "optimizer_collective": Path("its optimizer.step() alone", "collective"),
    "iteration_collective": Path("the same step, and the batch from its loader", "collective"),
    "save_collective": Path("fleet.save_persistables, two workers", "collective"),
    "exe_run": Path("Executor.run of a program that ran before, two workers", "program"),
    "step_log": Path("step_sockets with durability='log'", "logged"),
    "log_over_none": Path(
        "what step_log opens and step_sockets does not", "logged", "step_sockets"
    ),
    "server_restart": Path("a killed server, from its start to its first step", "killed"),
    "worker_return": Path("a killed worker, from its start to its first step", "killed"),
    "fleetrun_start": Path("fleetrun with a server and two workers, to its end", "launched"),
}
#: together these take less than a minute
FAST = ("embedded", "sockets", "collective", "program")


def number(name: str) -> int:
    """The window of a path."""
    return list(PATHS).index(name) + 1
