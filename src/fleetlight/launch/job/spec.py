# SPDX-License-Identifier: Apache-2.0
"""`JobSpec`: what to run, as pure data that any backend reads."""

from __future__ import annotations

import dataclasses

from fleetlight.launch.job.encryption import variables
from fleetlight.roles.role import Endpoint, Kind
from fleetlight.roles.secret import Secret
from fleetlight.security.certificate_folder import Encryption

#: where launchers of several machines meet, when nothing else is said
DEFAULT_PORT = 6170


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """What one process uses."""

    cpus: int = 1
    gpus: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """The processes of one kind: of this machine, or of the job where the backend places them."""

    kind: Kind
    count: int = 0
    #: of each process
    resources: Resources = Resources()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Meeting:
    """How the launchers of several machines find each other."""

    #: the store all launchers talk to, on node 0
    master: Endpoint
    min_nodes: int
    max_nodes: int
    #: the machines in their order, when the user lists them
    hosts: tuple[str, ...] = ()
    #: the place this machine asks for
    rank: int | None = None
    #: True when this machine serves the store
    is_master: bool = False
    #: the certificates, when the store is inside TLS
    ssl: Encryption | None = None

    @property
    def is_elastic(self) -> bool:
        """True when the job may go on with fewer machines."""
        return self.min_nodes < self.max_nodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """This machine's part, for backends that start processes here."""

    #: the address other processes reach this machine at, and the interface that owns it
    host: str = "127.0.0.1"
    interface: str | None = None
    #: None when this machine is the whole job
    meeting: Meeting | None = None
    start_port: int | None = None
    #: GPU index of each worker; empty on CPUs
    devices: tuple[int, ...] = ()
    #: where each process is reached, when the user says so; else free ports are found
    workers: tuple[Endpoint, ...] = ()
    servers: tuple[Endpoint, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job: its processes, what they run, and how failures and stops are handled."""

    script: str
    arguments: tuple[str, ...] = ()
    #: True when `script` is a module name (`-m`)
    is_module: bool = False
    collective: bool = True
    worker: RoleSpec = RoleSpec(kind=Kind.WORKER, count=1)
    server: RoleSpec = RoleSpec(kind=Kind.SERVER)
    machine: MachineSpec = MachineSpec()
    log_dir: str = "log"
    max_restarts: int = 0
    tee: bool = False
    deadline_s: float = 300.0
    #: between SIGTERM and SIGKILL
    grace_s: float = 3.0
    #: the same where the processes save before they end
    stop_s: float = 30.0
    #: the certificates, as every process of this machine finds them
    ssl: Encryption | None = None
    #: the folder that the job saves into by itself
    checkpoint: str | None = None
    #: True when the job resumes what an earlier one has left
    resume: bool = False
    #: what the processes of the job prove to each other; None: the user gives none
    token: Secret | None = None
    #: every guess of the plan, for the user to read
    notes: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """What follows the interpreter."""
        return (*(("-m",) if self.is_module else ()), self.script, *self.arguments)

    @property
    def environment(self) -> dict[str, str]:
        """What every process of the job gets, on any backend; the token goes by a secret way."""
        return {
            **variables(self.ssl),
            **({} if self.checkpoint is None else {"FLEET_CHECKPOINT": self.checkpoint}),
            **({"FLEET_RESUME": "1"} if self.resume else {}),
        }

    @property
    def roles(self) -> tuple[RoleSpec, ...]:
        """The kinds that have processes; servers first, because workers wait for them."""
        return tuple(role for role in (self.server, self.worker) if role.count)

    @property
    def processes(self) -> int:
        """How many processes there are."""
        return sum(role.count for role in self.roles)
