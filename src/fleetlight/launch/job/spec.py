# SPDX-License-Identifier: Apache-2.0
"""`JobSpec`: what to run, as data that any backend reads."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from fleetlight.launch.job.encryption import variables
from fleetlight.roles.role import Endpoint, Kind
from fleetlight.roles.secret import Secret
from fleetlight.strategy.features.ssl import Encryption

#: names of hosts, which engines make from it, have at most 63 letters
_NAME_LENGTH = 40

#: the default of `--deadline_s`
DEADLINE_S = 300.0
#: the default rendezvous port of the launchers of several machines
DEFAULT_PORT = 6170


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of one process."""

    cpus: int = 1
    gpus: int = 0
    #: main memory; None: the engine's default
    memory_mib: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleSpec:
    """The processes of one kind on this machine, or in the job if the backend places them."""

    kind: Kind
    count: int = 0
    #: those of each process
    resources: Resources = Resources()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RendezvousSpec:
    """How the launchers of several machines find each other."""

    #: the address of the launchers' store, on node 0
    master: Endpoint
    min_nodes: int
    max_nodes: int
    #: the machines in rank order, if the user lists them
    hosts: tuple[str, ...] = ()
    #: the node rank that this machine asks for
    rank: int | None = None
    #: True when this machine serves the store
    is_master: bool = False
    #: the certificates, if the store uses TLS
    ssl: Encryption | None = None

    @property
    def is_elastic(self) -> bool:
        """True when the job may continue with fewer machines."""
        return self.min_nodes < self.max_nodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineSpec:
    """This machine's part of the job, for backends that start processes here."""

    #: the address at which other processes reach this machine, and its interface
    host: str = "127.0.0.1"
    interface: str | None = None
    #: None when the job has one machine
    rendezvous: RendezvousSpec | None = None
    start_port: int | None = None
    #: GPU index of each worker; empty on CPUs
    devices: tuple[int, ...] = ()
    #: the endpoints that the user gives; else the launcher finds free ports
    workers: tuple[Endpoint, ...] = ()
    servers: tuple[Endpoint, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What an engine needs to know beyond the processes of the job."""

    #: the name of the job there; "" for one made from the script's
    name: str = ""
    #: the options of the engine's own section, or of --option
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: additional variables of every process
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sinks:
    """Where metrics and events go besides the log folder."""

    #: the services that worker 0 feeds, for `FLEET_SINKS`; None: the user's variable stays
    metrics: str | None = None
    #: the collector of OpenTelemetry that gets events; "": its own variables name it; None: none
    events: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job: its processes, their command, and how it handles failures and stops."""

    script: str
    arguments: tuple[str, ...] = ()
    #: True when `script` is a module name (`-m`)
    is_module: bool = False
    collective: bool = True
    worker: RoleSpec = RoleSpec(kind=Kind.WORKER, count=1)
    server: RoleSpec = RoleSpec(kind=Kind.SERVER)
    #: keeps the rendezvous of a job with servers, where no server has an address that stays
    scheduler: RoleSpec = RoleSpec(kind=Kind.SCHEDULER)
    machine: MachineSpec = MachineSpec()
    engine: EngineSpec = EngineSpec()
    log_dir: str = "log"
    max_restarts: int = 0
    tee: bool = False
    #: the port of the live page, on the first machine; None: there is no page
    dashboard: int | None = None
    #: True when processes may be forked from one that has loaded torch
    preload: bool = True
    #: how long the machines wait for each other
    deadline_s: float = DEADLINE_S
    #: how long processes wait for each other; None: the script and its variables decide
    process_deadline_s: float | None = None
    #: the least important messages that processes log; "": their variables decide
    log_level: str = ""
    #: time between SIGTERM and SIGKILL
    grace_s: float = 3.0
    #: the same for processes that save before they exit
    stop_s: float = 30.0
    #: the certificates, by their path on this machine
    ssl: Encryption | None = None
    #: how many workers the job may have while it runs; None: it keeps its workers
    worker_max: int | None = None
    #: server 0 of the running job that the workers join
    join: str | None = None
    #: the folder for automatic checkpoints
    checkpoint: str | None = None
    #: services that get metrics and events of the job
    sinks: Sinks = Sinks()
    #: True when the job resumes an earlier one
    resume: bool = False
    #: the secret that the processes share; None: the user gives none
    token: Secret | None = None
    #: decisions of the plan that the user should know
    notes: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments of the Python interpreter."""
        return (*(("-m",) if self.is_module else ()), self.script, *self.arguments)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of every process on any backend; the token is passed separately."""
        return {
            **variables(self.ssl),
            **({} if self.checkpoint is None else {"FLEET_CHECKPOINT": self.checkpoint}),
            **({} if self.sinks.metrics is None else {"FLEET_SINKS": self.sinks.metrics}),
            **({"FLEET_RESUME": "1"} if self.resume else {}),
            **({} if self.worker_max is None else {"FLEET_WORKER_MAX": str(self.worker_max)}),
            **({} if self.join is None else {"FLEET_JOIN": self.join}),
            **self._limits,
        }

    @property
    def _limits(self) -> dict[str, str]:
        """The variables that bound waits and messages, where flags ask for it."""
        seconds = self.process_deadline_s
        return {
            **({"FLEET_DEADLINE_S": f"{seconds:g}"} if seconds else {}),
            **({"FLEET_LOG_LEVEL": self.log_level} if self.log_level else {}),
        }

    @property
    def roles(self) -> tuple[RoleSpec, ...]:
        """The roles that have processes; each waits for those before it."""
        roles = (self.scheduler, self.server, self.worker)
        return tuple(role for role in roles if role.count)

    @property
    def counts(self) -> dict[str, str]:
        """The variables with the counts of the job, for every process."""
        return {
            "FLEET_WORKER_NUM": str(self.worker.count),
            **({"FLEET_SERVER_NUM": str(self.server.count)} if self.server.count else {}),
            **({"FLEET_SCHEDULER_NUM": "1"} if self.scheduler.count else {}),
        }

    @property
    def name(self) -> str:
        """The name of the job in an engine: letters, digits and dashes."""
        stem = self.script.rsplit("/", 1)[-1].removesuffix(".py")
        words = re.findall("[a-z0-9]+", (self.engine.name or stem).lower())
        return "-".join(words)[:_NAME_LENGTH].strip("-") or "job"

    @property
    def processes(self) -> int:
        """The number of processes of all roles."""
        return sum(role.count for role in self.roles)
