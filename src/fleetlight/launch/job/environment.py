# SPDX-License-Identifier: Apache-2.0
"""The environment of each process: its role and its peers, without stale variables."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping

from fleetlight.launch.job import encryption
from fleetlight.launch.job.layout import JobLayout, JobProcess
from fleetlight.launch.job.spec import JobSpec
from fleetlight.launch.job.token import VARIABLE
from fleetlight.roles.environment import is_kept_from_children
from fleetlight.roles.password import PASSWORD_FILE
from fleetlight.roles.role import Endpoint, endpoint_text
from fleetlight.roles.unsupported import is_unsupported

#: variables that fleetrun sets for its children; inherited values would contradict them
_OURS = re.compile(
    r"FLEET_(ROLE|INDEX|WORKER_NUM|SERVER_NUM|SCHEDULER_NUM|SERVERS|MASTER|WORKER_ENDPOINTS"
    r"|SERVER_ENDPOINTS|LOCAL_RANK|LOCAL_SIZE|NODE_RANK|NODE_NUM|HOST|DEVICE|RESTART|ERROR_FILE"
    r"|LOG_DIR|JOB)|FLAGS_selected_gpus"
)

# Processes connect to each other directly; a proxy would slow the job down or break it.
_PROXY = re.compile(r"(https?|all|no|ftp)_proxy", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What all processes of this machine share during one start of the job."""

    job: JobSpec
    #: equal on all machines, and kept across restarts
    job_id: str = ""
    layout: JobLayout
    log_dir: str
    error_dir: str
    restart: int = 0

    def error_file(self, member: JobProcess) -> str:
        """The status file of a process."""
        return f"{self.error_dir}/{member.log_name}.{self.restart}.json"


def is_set_by_launcher(name: str) -> bool:
    """True for a variable that the launcher or engine sets, or that has a secret."""
    # a user chooses which tasks of a step are servers
    chosen = name == "FLEET_SERVERS"
    return (bool(_OURS.fullmatch(name)) and not chosen) or name == VARIABLE


def inherited(outside: Mapping[str, str]) -> dict[str, str]:
    """The part of fleetrun's own environment that children keep."""
    return {name: value for name, value in outside.items() if not _is_dropped(name)}


def dropped_proxies(outside: Mapping[str, str]) -> list[str]:
    """The proxy variables that children do not get."""
    return sorted(name for name in outside if _PROXY.fullmatch(name))


def _is_dropped(name: str) -> bool:
    # variables of other systems stay: fleet.init names what to use in their place
    misleads = _OURS.fullmatch(name) or _PROXY.fullmatch(name) or is_kept_from_children(name)
    return bool(misleads) and not is_unsupported(name)


def command_environment(outside: Mapping[str, str], cpus: int, error_file: str) -> dict[str, str]:
    """The environment of a process that an engine starts, with the role that the engine gives."""
    kept = {name: value for name, value in outside.items() if not _PROXY.fullmatch(name)}
    return {
        **_defaults_of_any(cpus),
        **kept,
        **_password_file(kept),
        "FLEET_ERROR_FILE": error_file,
    }


def member_environment(run: Run, member: JobProcess, outside: Mapping[str, str]) -> dict[str, str]:
    """The complete environment of one process."""
    kept = encryption.without_read(run.job.ssl, inherited(outside))
    return {
        **_defaults(run.job, member, kept),
        **kept,
        **_password_file(kept),
        **identity(run, member),
        "FLEET_JOB": run.job_id,
        "FLEET_MAX_RESTARTS": str(run.job.max_restarts),
        **secret(run.job),
        **(_torch_identity(run.layout, member) if member.kind.value == "worker" else {}),
    }


def _password_file(kept: Mapping[str, str]) -> dict[str, str]:
    # a script may change its working directory
    file = kept.get(PASSWORD_FILE)
    return {PASSWORD_FILE: os.path.abspath(file)} if file else {}


def secret(job: JobSpec) -> dict[str, str]:
    """The job's token, which is never printed."""
    return {} if job.token is None else {VARIABLE: job.token.reveal()}


def identity(run: Run, member: JobProcess) -> dict[str, str]:
    """The FLEET_* variables that describe a process; `fleetrun -v` prints them."""
    layout = run.layout
    device = {} if member.device is None else {"FLEET_DEVICE": str(member.device)}
    return {
        "FLEET_ROLE": member.kind.value,
        "FLEET_INDEX": str(member.index),
        "FLEET_WORKER_NUM": str(len(layout.workers)),
        "FLEET_SERVER_NUM": str(len(layout.servers)),
        "FLEET_MASTER": endpoint_text(layout.master),
        "FLEET_WORKER_ENDPOINTS": joined(layout.workers),
        "FLEET_SERVER_ENDPOINTS": joined(layout.servers),
        "FLEET_LOCAL_RANK": str(member.local_rank),
        "FLEET_LOCAL_SIZE": str(member.local_size),
        "FLEET_NODE_RANK": str(layout.own),
        "FLEET_NODE_NUM": str(len(layout.nodes)),
        "FLEET_HOST": layout.node.host,
        **device,
        **run.job.environment,
        "FLEET_RESTART": str(run.restart),
        "FLEET_ERROR_FILE": run.error_file(member),
        "FLEET_LOG_DIR": run.log_dir,
    }


def joined(endpoints: Iterable[Endpoint]) -> str:
    """`host:port,host:port`, IPv6 hosts in brackets."""
    return ",".join(map(endpoint_text, endpoints))


def _torch_identity(layout: JobLayout, member: JobProcess) -> dict[str, str]:
    """torch's variables, so that a plain torch.distributed script runs too."""
    host, port = layout.master
    gpu = {} if member.device is None else {"FLAGS_selected_gpus": str(member.device)}
    return {
        "RANK": str(member.index),
        "WORLD_SIZE": str(member.of),
        "LOCAL_RANK": str(member.local_rank),
        "LOCAL_WORLD_SIZE": str(member.local_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        **gpu,
    }


def _defaults(job: JobSpec, member: JobProcess, kept: Mapping[str, str]) -> dict[str, str]:
    """Defaults of variables that the user may set."""
    role = job.worker if member.kind is job.worker.kind else job.server
    interface = _interface_of_others(job)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    return {
        **_defaults_of_any(role.resources.cpus),
        **{name: str(interface) for name in names if name not in kept},
    }


def _defaults_of_any(cpus: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(cpus),
        "PYTHONUNBUFFERED": "1",
        # torch's store logs 40 lines of C++ stack for a lost peer, which the errors name in one
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def _interface_of_others(job: JobSpec) -> str | None:
    """The interface that leads to the other machines of the job, if any."""
    return job.machine.interface if job.machine.rendezvous else None


def remarks(job: JobSpec, outside: Mapping[str, str]) -> list[str]:
    """One line for each variable that fleetrun chooses or drops automatically."""
    lines = []
    if "OMP_NUM_THREADS" not in outside:
        number = job.processes
        among = f"shared by {number} processes" if number > 1 else "for one process"
        lines.append(
            f"OMP_NUM_THREADS={job.worker.resources.cpus}: the cores of this machine {among} "
            "(set it to choose)"
        )
    if interface := _interface_of_others(job):
        free = [n for n in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if n not in outside]
        lines += [f"{name}={interface}: the interface of {job.machine.host}" for name in free]
    if proxies := dropped_proxies(outside):
        lines.append(
            f"not passed on: {', '.join(proxies)} (processes connect to each other directly)"
        )
    return lines
