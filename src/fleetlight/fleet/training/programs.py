# SPDX-License-Identifier: Apache-2.0
"""Static programs in every job: how they run, and which one is the main program."""

from __future__ import annotations

from fleetlight.errors import NoProgramError
from fleetlight.fleet.job import Job
from fleetlight.static.program import Program
from fleetlight.static.running.options import RunOptions

#: the program that was given to a registered optimizer last
_main: Program | None = None


def options_of(job: Job) -> RunOptions:
    """How the programs of a job are run."""
    strategy = job.strategy
    threads = dict(strategy.execution_strategy.changed()).get("num_threads")
    return RunOptions(strategy.fetch_frequency, threads)


def main_program() -> Program:
    """The program that `minimize` of a registered optimizer has completed last."""
    if _main is None:
        raise NoProgramError(
            "fleet.main_program: there is no program yet; there is one after "
            "optimizer.minimize(loss), with the optimizer that fleet.distributed_optimizer returned"
        )
    return _main


def remember(program: Program) -> None:
    """It is the main program from now on."""
    global _main
    _main = program


def forget() -> None:
    """There is no main program any more."""
    global _main
    _main = None
