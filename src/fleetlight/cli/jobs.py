# SPDX-License-Identifier: Apache-2.0
"""`fleetlight ps | logs | stop | scale`: commands for a job on any backend."""

from __future__ import annotations

import argparse
import os
import sys

from fleetlight.cli.terminal.following import follow
from fleetlight.cli.terminal.output import print_table, tone_of_state
from fleetlight.errors import ConfigError
from fleetlight.launch import backends
from fleetlight.launch.backends import JobControl

_JOB = "the job: the log folder of fleetrun, or ENGINE:ID, as fleetrun printed it"
#: the backend of a job that is only a path
_PATHS = "processes"


def add_jobs(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the parser of `fleetlight`."""
    ps = commands.add_parser("ps", help="list the processes of a job")
    ps.add_argument("job", metavar="JOB", help=_JOB)
    ps.set_defaults(command=_ps)
    logs = commands.add_parser("logs", help="print what the processes of a job have printed")
    logs.add_argument("job", metavar="JOB", help=_JOB)
    logs.add_argument("member", nargs="*", metavar="MEMBER", help="one of them, such as: worker 1")
    logs.add_argument(
        "-f", "--follow", action="store_true", help="print what follows until the job has ended"
    )
    logs.set_defaults(command=_logs)
    stop = commands.add_parser(
        "stop", help="stop a job (saves a checkpoint first if it has a checkpoint folder)"
    )
    stop.add_argument("job", metavar="JOB", help=_JOB)
    stop.set_defaults(command=_stop)
    scale = commands.add_parser("scale", help="change the number of workers or servers of a job")
    scale.add_argument("job", metavar="JOB", help=_JOB)
    scale.add_argument("--worker_num", type=int, metavar="N", help="workers from now on")
    scale.add_argument("--server_num", type=int, metavar="N", help="servers from now on")
    scale.set_defaults(command=_scale)


def _ps(found: argparse.Namespace) -> int:
    control, job_id = _found(found.job)
    found_states = control.status(job_id)
    rows = [(one.name, one.state, one.where, one.detail) for one in found_states]
    tones = [tone_of_state(one.state) for one in found_states]
    print_table([("process", "state", "machine", ""), *rows], tones)
    return 0


def _logs(found: argparse.Namespace) -> int:
    control, job_id = _found(found.job)
    member = " ".join(found.member) or None
    shown = follow(control, job_id, member) if found.follow else control.logs(job_id, member)
    for data in shown:
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    return 0


def _stop(found: argparse.Namespace) -> int:
    control, job_id = _found(found.job)
    control.stop(job_id)
    print(f"stopping: {found.job}")
    return 0


def _scale(found: argparse.Namespace) -> int:
    control, job_id = _found(found.job)
    wanted = {"worker": found.worker_num, "server": found.server_num}
    counts = {role: count for role, count in wanted.items() if count is not None}
    if not counts:
        raise ConfigError("fleetlight scale: pass --worker_num N or --server_num N, or both")
    for role, count in counts.items():
        if count < 1:
            raise ConfigError(f"--{role}_num {count}: a job needs at least 1 {role}")
    name = found.job.partition(":")[0]
    print(f"scaling: {name}:{control.scale(job_id, counts)}")
    return 0


def _found(job: str) -> tuple[JobControl, str]:
    """What to ask about a job, and the id that the job has there."""
    name, _, job_id = job.partition(":")
    controls = {known: backends.named(known).control for known in backends.names()}
    control = controls.get(name)
    if control is not None and job_id:
        return control, job_id
    local = controls[_PATHS]
    if local is not None and (os.path.isdir(job) or os.sep in job):
        return local, job
    known = sorted(name for name, one in controls.items() if one is not None)
    raise ConfigError(
        f"got the job {job!r}, expected the log folder of a job, or BACKEND:ID with one of the "
        f"backends {', '.join(known)}; fleetrun prints it"
    )
