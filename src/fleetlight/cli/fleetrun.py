# SPDX-License-Identifier: Apache-2.0
"""`fleetrun`: start a distributed job."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fleetlight.cli.arguments import parse
from fleetlight.cli.job_file import with_places
from fleetlight.cli.terminal.output import complain
from fleetlight.errors import ConfigError, FleetError
from fleetlight.launch.job.options import LaunchOptions, from_cloud

if TYPE_CHECKING:
    from fleetlight.launch.backends import Backend
    from fleetlight.launch.job.spec import JobSpec

#: exit codes of fleetrun itself; after a failed process fleetrun exits with its code
WRONG_USE, CANNOT_RUN, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        return _run_with_places(parse(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        return _refuse(error, WRONG_USE)
    except FleetError as error:
        return _refuse(error, CANNOT_RUN)
    except KeyboardInterrupt:
        return INTERRUPTED


def _refuse(error: FleetError, code: int) -> int:
    complain("fleetrun", error)
    return code


def _run_with_places(options: LaunchOptions) -> int:
    """Run the job; errors about values of a job file name their places in it."""
    try:
        return _run(from_cloud(options, os.environ))
    except ConfigError as error:
        raise ConfigError(with_places(error, options)) from None


def _run(options: LaunchOptions) -> int:
    # imported late, because `fleetrun --help` needs no processes and sockets
    from fleetlight.cli.terminal.screen import StandardOutput
    from fleetlight.launch import backends, inventory
    from fleetlight.launch.job.plan import plan
    from fleetlight.launch.job.script import check_script
    from fleetlight.launch.processes.followers import dashboard, event_export
    from fleetlight.launch.screen import arguments_block

    backend = None if options.on is None else backends.named(options.on)
    if backend is None or backend.shares_files:
        check_script(options)
    is_placed_here = backend is None or not backend.chooses_machines
    machine = inventory.this_machine(os.environ) if is_placed_here else None
    job = plan(options, machine, os.environ)
    if job.dashboard is not None:
        dashboard.check_packages()
    if job.sinks.events is not None:
        event_export.check_packages()
    if options.print:
        # the notes would be a part of what goes to another program
        print(*job.notes, sep="\n", end="\n" if job.notes else "", file=sys.stderr)
        sys.stdout.write(_emitted(backend, options, job))
        return 0
    screen = StandardOutput(verbose=options.verbose, quiet=options.quiet)
    if screen.verbose:
        screen.block(arguments_block(_argument_pairs(options)))
    for note in job.notes:
        screen.say(note)
    return (backend or backends.default_for(job)).run(job, screen)


def _emitted(backend: Backend | None, options: LaunchOptions, job: JobSpec) -> str:
    """What the engine would get."""
    if backend is None or backend.engine is None:
        raise ConfigError(
            f"--print shows what an engine would get, but --on {options.on} starts the processes "
            "itself; fleetrun -v shows their variables"
        )
    return backend.engine.emit(job)


def _argument_pairs(options: LaunchOptions) -> list[tuple[str, object]]:
    """The arguments that are set, so that a log records how a job was started."""
    names = [field.name for field in dataclasses.fields(options) if field.name != "places"]
    pairs = [(name, getattr(options, name)) for name in names]
    return [(name, _as_text(name, value)) for name, value in pairs if value not in (None, ())]


def _as_text(name: str, value: object) -> object:
    between = {"arguments": " ", "nnodes": ":", "master": ":"}.get(name, ",")
    return between.join(map(str, value)) if isinstance(value, tuple) else value


if __name__ == "__main__":
    sys.exit(main())
