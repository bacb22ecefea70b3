# SPDX-License-Identifier: Apache-2.0
"""Runs a job on a Ray cluster: an actor for each process, which starts the script as a child.

Ray places the actors and starts lost ones again, on another node if necessary. The processes meet
at the driver, so a server may return at another address. No value of the training passes through
Ray's object store. `fleetrun --on ray` runs this module as the driver of a Ray job.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fleetlight.collective.membership.scheduler import Scheduler
from fleetlight.errors import ConfigError, LaunchError
from fleetlight.launch.backends.ray import spec_from_json
from fleetlight.launch.exit_codes import RESUME_CODE, exit_code
from fleetlight.launch.job.spec import JobSpec, RoleSpec
from fleetlight.ps.rendezvous.scheduler import RendezvousScheduler
from fleetlight.ps.rendezvous.service import JobSize
from fleetlight.roles.role import Endpoint, Kind, Role, endpoint_text
from fleetlight.roles.secret import Secret
from fleetlight.security.context import both_contexts
from fleetlight.version import VERSION
from fleetlight.wire.listening import bound

#: how often the driver looks at a signal, and how long actors may take to get their resources
_LOOK_S, _PLACE_S = 0.5, 300.0
#: the exit code of an actor without its process; Ray starts the actor again
_LOST = 1
#: prctl.h: PR_SET_PDEATHSIG
_DEATH_SIGNAL = 1


@dataclasses.dataclass
class _ActorProcess:
    """One process of the job, and the actor that runs it."""

    name: str
    kind: Kind
    actor: Any
    #: the result of the actor: the exit code of the process
    ended: Any
    code: int | None = None


def _say(text: str) -> None:
    sys.stdout.write(f"fleetlight: {text}\n")
    sys.stdout.flush()


def run(job: JobSpec, say: Callable[[str], None] = _say) -> int:
    """Run a job to its end on the cluster to which this process is connected.

    Returns the exit code of the first process that failed, else 0, or 75 if the job was stopped
    and saved.
    """
    if job.token is not None:
        raise ConfigError("on Ray, the driver makes the token of the job itself; give none")
    token = Secret(secrets.token_hex(32))
    with contextlib.ExitStack() as stack:
        # the members have the whole deadline, once there is room for them
        groups = [stack.enter_context(_placed(role, job)) for role in _roles(job)]
        master = stack.enter_context(_rendezvous_of(job, token))
        common = {
            **job.environment,
            **job.engine.variables,
            **dataclasses.replace(job, scheduler=RoleSpec(kind=Kind.SCHEDULER, count=1)).counts,
            "FLEET_MASTER": endpoint_text(master),
            # fleetrun gives the job the id that Ray has for it
            "FLEET_JOB": os.environ.get("FLEET_JOB") or f"ray-{secrets.token_hex(6)}",
            "FLEET_MAX_RESTARTS": str(job.max_restarts),
            "FLEET_DEADLINE_S": f"{job.deadline_s:g}",
            "FLEET_TOKEN": token.reveal(),
        }
        processes = [
            process
            for role, group in zip(_roles(job), groups, strict=True)
            for process in _started(role, group, job, common)
        ]
        say(f"started {len(processes)} processes, which meet at {endpoint_text(master)}")
        return _JobWatch(job, processes, say).wait()


def _roles(job: JobSpec) -> Sequence[RoleSpec]:
    return [role for role in (job.server, job.worker) if role.count]


@contextlib.contextmanager
def _rendezvous_of(job: JobSpec, token: Secret) -> Iterator[Endpoint]:
    """Keep the rendezvous of the job in this process."""
    host, tls = ray.util.get_node_ip_address(), both_contexts(job.ssl)
    with bound(host, 0) as reserved:
        port = reserved.getsockname()[1]
    if job.server.count:
        size = JobSize(VERSION, "", job.worker.count, job.server.count)
        rendezvous = RendezvousScheduler((host, port), size, job.deadline_s, tls=tls, token=token)
        threading.Thread(target=rendezvous.run, name="fleet-scheduler", daemon=True).start()
        try:
            yield host, port
        finally:
            rendezvous.stop()
        return
    role = Role(kind=Kind.SCHEDULER, worker_num=job.worker.count, master=(host, port))
    scheduler = Scheduler(role, job.deadline_s, tls)
    threading.Thread(target=scheduler.run, name="fleet-scheduler", daemon=True).start()
    yield host, port


@contextlib.contextmanager
def _placed(role: RoleSpec, job: JobSpec) -> Iterator[Any]:
    """Reserve the resources of a role: servers on different nodes, workers on few."""
    strategy = "SPREAD" if role.kind is Kind.SERVER else "PACK"
    group = placement_group([_bundle(role)] * role.count, strategy=strategy)
    try:
        if not group.wait(min(_PLACE_S, job.deadline_s)):
            raise LaunchError(
                f"Ray has no room for {role.count} {role.kind.value}s with {_bundle(role)} each; "
                f"it has {ray.available_resources()} free; ask for less, or add nodes"
            )
        yield group
    finally:
        remove_placement_group(group)


def _bundle(role: RoleSpec) -> dict[str, float]:
    resources = role.resources
    bundle = {"CPU": float(resources.cpus)}
    if resources.gpus:
        bundle["GPU"] = float(resources.gpus)
    if resources.memory_mib is not None:
        bundle["memory"] = float(resources.memory_mib << 20)
    return bundle


def _started(
    role: RoleSpec, group: Any, job: JobSpec, common: Mapping[str, str]
) -> Iterator[_ActorProcess]:
    """Start the actors of a role, and the processes in them."""
    bundle = _bundle(role)
    for index in range(role.count):
        name = f"{role.kind.value} {index}"
        actor = _MemberActor.options(  # type: ignore[attr-defined]
            name=f"{common['FLEET_JOB']} {name}",
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0.0),
            memory=bundle.get("memory"),
            max_restarts=job.max_restarts,
            # while a node is lost and Ray has not noticed, calls fail and count as tries
            max_task_retries=-1 if job.max_restarts else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=-1
            ),
        ).remote(name)
        # without servers, the scheduler of the driver assigns the indices
        known = {"FLEET_INDEX": str(index)} if job.server.count else {}
        identity = {"FLEET_ROLE": role.kind.value, **known}
        threads = {"OMP_NUM_THREADS": str(role.resources.cpus)}
        # Ray shows each actor only its own GPUs
        device = {"FLEET_DEVICE": "0"} if role.resources.gpus else {}
        environment = {**threads, **common, **identity, **device}
        command = ["fleetlight.cli.fleetlight", "member", "--restarts", str(job.max_restarts), "--"]
        ended = actor.run.remote(command, list(job.command), environment, os.getcwd())
        yield _ActorProcess(name, role.kind, actor, ended)


@ray.remote(concurrency_groups={"stops": 1})
class _MemberActor:
    """Runs one process of a job as a child, and ends with it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._child: subprocess.Popen[bytes] | None = None
        self._is_stopping = False

    def __repr__(self) -> str:
        """The prefix of its lines in Ray's logs."""
        return self._name

    def run(
        self,
        shim: Sequence[str],
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
    ) -> int:
        """Run the script to its end; returns its exit code, even to a call that Ray repeats."""
        if self._child is None:
            outside = {**os.environ, "FLEET_HOST": ray.util.get_node_ip_address()}
            self._child = subprocess.Popen(
                [sys.executable, "-m", *shim, sys.executable, *command],
                env={**outside, **environment},
                # the driver's folder where the nodes share it, else the copy that Ray made
                cwd=folder if os.path.isdir(folder) else None,
                preexec_fn=_end_with_parent,
            )
            if self._is_stopping:
                self._child.send_signal(signal.SIGTERM)
        code = self._child.wait()
        if code < 0 and self._is_stopping:
            return exit_code(code)
        if code < 0:
            # Ray kills the children of an actor that it ends before the actor: this is no result
            os._exit(_LOST)
        return code

    @ray.method(concurrency_group="stops")  # type: ignore[untyped-decorator]
    def stop(self) -> None:
        """Ask the process to save and end, while `run` waits for it."""
        self._is_stopping = True
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)


def _end_with_parent() -> None:
    """Let the kernel kill this process when the actor is killed."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


class _JobWatch:
    """Waits for the processes of a job; the first failure ends it."""

    def __init__(
        self, job: JobSpec, processes: Sequence[_ActorProcess], say: Callable[[str], None]
    ) -> None:
        self._job, self._processes, self._say = job, processes, say
        self._is_stopping = False

    def wait(self) -> int:
        """Wait for the end of the job; returns its exit code."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda number, frame: self._ask_to_stop())
        pending = {process.ended: process for process in self._processes}
        while pending:
            ready, _ = ray.wait(list(pending), timeout=_LOOK_S)
            for ended in ready:
                process = pending.pop(ended)
                process.code = self._code_of(process)
                if process.code not in (0, RESUME_CODE):
                    self._say(f"failed: {process.name} ended with code {process.code}")
                    self._end_rest(list(pending.values()))
                    return process.code
        codes = {process.code for process in self._processes}
        code = RESUME_CODE if RESUME_CODE in codes else 0
        self._say("stopped and saved" if code else "done: all processes ended with code 0")
        return code

    def _code_of(self, process: _ActorProcess) -> int:
        try:
            return int(ray.get(process.ended))
        except RayActorError as error:
            self._say(f"{process.name} was lost: {str(error).splitlines()[0]}")
            return 1

    def _ask_to_stop(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            for process in self._processes:
                process.actor.stop.options(max_task_retries=0).remote()

    def _end_rest(self, rest: Sequence[_ActorProcess]) -> None:
        """Give the other processes time to report the failure, then end them."""
        end = time.monotonic() + self._job.grace_s
        with contextlib.suppress(RayError):
            ray.wait(
                [process.ended for process in rest],
                num_returns=len(rest),
                timeout=max(0.0, end - time.monotonic()),
            )
        for process in rest:
            ray.kill(process.actor, no_restart=True)


def main(argv: Sequence[str]) -> int:
    """The driver of a Ray job: runs the job that its argument describes."""
    job = spec_from_json(argv[0].encode())
    ray.init()
    return run(job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
