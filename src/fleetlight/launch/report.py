# SPDX-License-Identifier: Apache-2.0
"""The lines that the launcher prints about a job, from its start to its end."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Mapping, Sequence

from fleetlight.launch.exit_codes import RESUME_CODE, exit_code
from fleetlight.launch.job.environment import Run
from fleetlight.launch.job.layout import JobLayout, JobProcess
from fleetlight.launch.machines.other_machines import Conclusion, NextAction
from fleetlight.launch.processes.failure import JobFailure
from fleetlight.launch.processes.logs import LogFolder, relative
from fleetlight.launch.processes.watch import Watch
from fleetlight.launch.screen import boxed
from fleetlight.launch.status import Stop
from fleetlight.observe.console import Tone
from fleetlight.roles.address import is_loopback
from fleetlight.roles.role import Kind, endpoint_text

_KINDS = (Kind.SERVER, Kind.WORKER)


def table(member: JobProcess, variables: Mapping[str, str]) -> str:
    """The environment of one process."""
    return boxed(("Distributed Envs", f"Value ({member.name})"), list(variables.items()))


def first_of_each_kind(members: Sequence[JobProcess]) -> list[JobProcess]:
    """The first server and the first worker of this machine."""
    found = (next((m for m in members if m.kind is kind), None) for kind in _KINDS)
    return [member for member in found if member is not None]


def folder(logs: LogFolder, asked: str, *, verbose: bool) -> list[str]:
    """Lines about a log folder that is another than asked for, or that had old logs."""
    lines = []
    if logs.path != pathlib.Path(asked).absolute():
        lines.append(
            f"{asked} is in use by another fleetrun: logs of this run go to {relative(logs.path)}"
        )
    if logs.moved_to is not None and verbose:
        lines.append(f"moved the logs of an earlier run to {relative(logs.moved_to)}")
    return lines


def joinable(run: Run) -> str:
    """How other workers join the job."""
    host, port = run.layout.servers[0]
    there = endpoint_text((host, port))
    far = "" if is_loopback(host) else f", --join {there} on others if you gave FLEET_TOKEN"
    return (
        f"up to {run.job.worker_max} workers: fleetrun --join {run.log_dir} --worker_num N adds "
        f"some on this machine{far}"
    )


def started(run: Run, members: Sequence[JobProcess]) -> str:
    """What runs on this machine and where its output is."""
    parts = [_span(kind, members) for kind in _KINDS]
    what = " and ".join(part for part in parts if part) or "nothing"
    layout = run.layout
    here = f" on {layout.node_name(layout.own)}" if len(layout.nodes) > 1 else " on this machine"
    logs = relative(pathlib.Path(run.log_dir))
    names = [f"{logs}/{kind}log.N" for kind in sorted({one.kind.value for one in members})]
    return f"starting {run.job.script}: {what}{here}; logs: {', '.join(names) or logs}"


def _span(kind: Kind, members: Sequence[JobProcess]) -> str:
    own = [member for member in members if member.kind is kind]
    if not own:
        return ""
    first, last, of = own[0].index, own[-1].index, own[0].of
    numbers = f"{kind.value} {first}" if first == last else f"{kind.value}s {first} to {last}"
    return f"{numbers} of {of}"


def restarting(conclusion: Conclusion, restart: int, left: int) -> str:
    """Why all processes restart."""
    if conclusion.next is NextAction.REGROUP:
        reason = str(conclusion.failure) if conclusion.failure else "another machine joined"
        return f"{reason}; restarting with the connected machines (restart {restart})"
    return (
        f"failed: {conclusion.failure}; restarting all processes (restart {restart}, {left} left)"
    )


def stopped(stop: Stop) -> JobFailure:
    """A stop that the user or a job scheduler asked for; the job can resume."""
    return JobFailure(
        what=(
            f"stopped at step {stop.step}, saved in {stop.folder}; resume with fleetrun "
            f"--checkpoint {stop.folder} --resume and any number of processes"
        ),
        code=RESUME_CODE,
        # servers count no steps: a machine with workers reports the step
        consequence=not stop.step,
        may_restart=False,
        stopped=True,
    )


def not_saved(failure: JobFailure | None) -> str:
    """The outcome of a stop that did not save the job."""
    why = "in time" if failure is None else f"({failure})"
    return f"the job did not save {why}; earlier saves remain"


def stopped_early(checkpoint: str | None, log_dir: str) -> str:
    """The outcome of an interrupt before the job could save."""
    if checkpoint is None:
        return ""
    return (
        f"the job saved nothing; {checkpoint} is unchanged (fleetlight stop {log_dir} saves first)"
    )


def interrupted(number: int, after_s: float, node: str = "", error: str = "") -> JobFailure:
    """An interrupt by the user or a job scheduler."""
    who = "you" if number == signal.SIGINT else signal.Signals(number).name
    return JobFailure(
        what=f"stopped by {who}",
        code=exit_code(-number),
        after_s=after_s,
        node=node,
        killed=True,
        may_restart=False,
        error=error,
        interrupted=True,
    )


def end(layout: JobLayout, watch: Watch, failure: JobFailure | None, seconds: float) -> str:
    """The last line of a job: its success or its failure."""
    if failure is not None:
        is_stop = failure.stopped or failure.interrupted
        return str(failure) if is_stop else f"failed: {failure}"
    workers, machines = len(layout.workers), len(layout.nodes)
    count = f"all {workers} workers" if workers > 1 else "the worker"
    where = f" on {machines} machines" if machines > 1 else ""
    if lost := sorted(one.member.name for one in watch.continued_without if not one.is_done):
        count = f"all workers but {', '.join(lost)}"
    done = f"done: {count}{where} exited with code 0 after {seconds:.1f} s"
    if not layout.servers:
        return done
    return f"{done}; servers ended" + ("" if watch.ended_servers else " by themselves")


def tone_of_end(failure: JobFailure | None) -> Tone:
    """The tone of the last line."""
    if failure is None:
        return Tone.GOOD
    return Tone.PLAIN if failure.stopped or failure.interrupted else Tone.BAD


def not_joined(layout: JobLayout, script: str) -> tuple[str, Tone] | None:
    """The line about a script that has ended without `fleet.init`, if that matters."""
    if layout.servers:
        text = (
            f"{script} never called fleet.init: the servers stored nothing, each worker ran alone"
        )
        return text, Tone.WARNING
    if len(layout.workers) == 1:
        return None
    # such a script is a job without Fleetlight
    return (
        f"{script} never called fleet.init: unless it uses torch.distributed, each of the "
        f"{len(layout.workers)} workers trained alone",
        Tone.PLAIN,
    )
