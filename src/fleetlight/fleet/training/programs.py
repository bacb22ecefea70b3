# SPDX-License-Identifier: Apache-2.0
"""Static programs in every kind of job: their run options, and the main program."""

from __future__ import annotations

from fleetlight.errors import NoProgramError
from fleetlight.fleet.job import Job
from fleetlight.static.program import Program
from fleetlight.static.running.options import RunOptions

#: the last program that a registered optimizer has minimized
_main: Program | None = None


def options_of(job: Job) -> RunOptions:
    """The run options of a job's programs."""
    strategy = job.strategy
    threads = dict(strategy.execution_strategy.changed()).get("num_threads")
    return RunOptions(strategy.fetch_frequency, threads)


def tell_of(program: Program, job: Job) -> None:
    """Tell of the program that the job trains, once, before it runs."""
    if job.program_runs is not None and program.form.trains:
        told, job.program_runs = job.program_runs, None
        told(program)


def main_program() -> Program:
    """The last program that `minimize` of a registered optimizer has completed."""
    if _main is None:
        raise NoProgramError(
            "fleet.main_program: there is no program yet; call optimizer.minimize(loss) first, "
            "with the optimizer that fleet.distributed_optimizer returned"
        )
    return _main


def remember(program: Program) -> None:
    """Make it the main program."""
    global _main
    _main = program


def forget() -> None:
    """Forget the main program."""
    global _main
    _main = None
