# SPDX-License-Identifier: Apache-2.0
"""`Role`: what a process knows about itself and its peers before the job forms."""

from __future__ import annotations

import dataclasses
import enum
import ipaddress
import logging
from typing import ClassVar

from fleetlight.errors import RoleError
from fleetlight.roles.secret import Secret

Endpoint = tuple[str, int]

#: a server keeps some lists by place
MAX_PLACES = 100_000


class Kind(str, enum.Enum):
    """What a process of a job does."""

    WORKER = "worker"
    SERVER = "server"
    SCHEDULER = "scheduler"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Role:
    """One process of a job. `None` means unknown until the job forms.

    Args:
        kind: worker, server or scheduler.
        index: the number of this process among those of its kind.
        worker_num: how many workers the job has.
        server_num: how many parameter servers the job has.
        worker_max: how many workers a job with servers may have while it runs; None: `worker_num`.
        join: server 0 of the running job that this worker joins.
        dialect: the kind of variables that the role comes from.
        master: where the job forms: worker 0, the scheduler, or the launcher's agent.
        master_keeper: what serves `master` if worker 0 does not.
        worker_endpoints: the endpoint of each worker.
        server_endpoints: the endpoint of each server.
        local_rank: the index of this worker on its host.
        local_size: how many workers this host has.
        node_rank: the index of this host.
        node_num: how many hosts the job has.
        address: the address of this process; by default the one that reaches `master`.
        device: the index of this worker's GPU, None for the CPU.
        node_id: a name that a restarted process keeps (MindSpore's MS_NODE_ID).
        restart: how often the launcher has restarted the job.
        deadline_s: seconds that the job may take to form, if a variable gives them.
        deadline_variable: the name of that variable.
        error_file: the file in which this process reports its status to the launcher.
        log_dir: the log folder of the job.
        job: the id of the job, which restarted processes keep.
        resume: True if the job resumes an earlier one.
        may_begin: with `resume`: True if the job begins where nothing is saved.
        max_restarts: how often the launcher may restart processes, None if unknown.
        log_level: the least important messages that are logged, by the number of their level.
        token: the secret of the job's processes.

    Raises:
        RoleError: two of the facts contradict each other.

    Example:
        >>> fleet.Role(kind=fleet.Role.SERVER, index=1, server_num=2).is_server
        True
    """

    #: Fleet's names, for `UserDefinedRoleMaker(role=fleet.Role.SERVER)`
    WORKER: ClassVar[Kind] = Kind.WORKER
    SERVER: ClassVar[Kind] = Kind.SERVER

    kind: Kind = Kind.WORKER
    index: int | None = 0
    worker_num: int = 1
    server_num: int = 0
    #: how many workers a job with servers may have while it runs; None: it keeps `worker_num`
    worker_max: int | None = None
    #: server 0 of the running job that this worker joins
    join: Endpoint | None = None
    dialect: str = "single"
    #: where the job forms: the endpoint of worker 0, the scheduler, or the launcher's agent
    master: Endpoint | None = None
    #: what serves `master` if worker 0 does not
    master_keeper: str | None = None
    worker_endpoints: tuple[Endpoint, ...] = ()
    server_endpoints: tuple[Endpoint, ...] = ()
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    node_num: int | None = None
    #: this process's address if the user or the launcher gives it; else by the route to `master`
    address: str | None = None
    #: the index of this worker's GPU, None for CPU
    device: int | None = None
    #: a name that a restarted process keeps (MindSpore's MS_NODE_ID)
    node_id: str | None = None
    #: how often the launcher has restarted the job
    restart: int = 0
    #: how long the job may take to form, if a variable says so, and the variable's name
    deadline_s: float | None = None
    deadline_variable: str | None = None
    #: the file in which this process reports its status to the launcher
    error_file: str | None = None
    #: the log folder of the job
    log_dir: str | None = None
    #: the job's id, which restarted processes keep; "" without one
    job: str = ""
    #: True if the job resumes an earlier one
    resume: bool = False
    #: with `resume`: True if the job begins where nothing is saved
    may_begin: bool = False
    #: how often the launcher may restart processes, None if unknown
    max_restarts: int | None = None
    #: the least important messages that are logged, by the number of their level
    log_level: int = logging.INFO
    #: the secret of the job's processes
    token: Secret | None = None

    def __post_init__(self) -> None:
        if self.worker_num < 1:
            raise RoleError(
                f"{self.dialect}: a job needs at least 1 worker, got worker_num={self.worker_num}"
            )
        if self.is_server and self.server_num < 1:
            raise RoleError(
                f"{self.dialect}: this process is a server, but server_num={self.server_num}, "
                "expected at least 1"
            )
        if self.worker_max is not None and self.worker_max < self.worker_num:
            raise RoleError(
                f"{self.dialect}: worker_max={self.worker_max}, expected at least worker_num="
                f"{self.worker_num}"
            )
        if self.places > MAX_PLACES:
            raise RoleError(
                f"{self.dialect}: got places for {self.places} workers, expected at most "
                f"{MAX_PLACES}"
            )
        members = {Kind.WORKER: self.places, Kind.SERVER: self.server_num, Kind.SCHEDULER: 1}
        self._check_place("index", members[self.kind], f"{self.kind.value}s")
        self._check_list("worker_endpoints", self.worker_num)
        self._check_list("server_endpoints", self.server_num)

    def check_host(self) -> None:
        """Refuse host ranks that do not fit the sizes given with them.

        This does not hold for sizes found when the job forms: a container may look like a host
        of its own, and yet have local rank 3.
        """
        self._check_place("local_rank", self.local_size, "workers on this host")
        self._check_place("node_rank", self.node_num, "hosts")

    def _check_place(self, fact: str, size: int | None, among: str) -> None:
        place: int | None = getattr(self, fact)
        if place is not None and size is not None and not 0 <= place < size:
            raise RoleError(
                f"{self.dialect}: {fact}={place}, expected 0 to {size - 1} for {size} {among}"
            )

    def _check_list(self, fact: str, size: int) -> None:
        endpoints: tuple[Endpoint, ...] = getattr(self, fact)
        if endpoints and len(endpoints) != size:
            raise RoleError(
                f"{self.dialect}: {fact} lists {len(endpoints)} endpoints, expected {size}"
            )
        if len(set(endpoints)) < len(endpoints):
            twice = next(e for e in endpoints if endpoints.count(e) > 1)
            raise RoleError(f"{self.dialect}: {fact} lists {endpoint_text(twice)} twice")

    @property
    def places(self) -> int:
        """The number of workers that the job may have."""
        return self.worker_num if self.worker_max is None else self.worker_max

    @property
    def is_elastic(self) -> bool:
        """True where workers may join and leave while the job runs."""
        return self.worker_max is not None

    @property
    def is_worker(self) -> bool:
        """True in a process that trains."""
        return self.kind is Kind.WORKER

    @property
    def is_server(self) -> bool:
        """True in a parameter server."""
        return self.kind is Kind.SERVER

    @property
    def must_resume(self) -> bool:
        """True when the job resumes an earlier one, or fails."""
        return self.resume and not self.may_begin

    @property
    def master_is_outside(self) -> bool:
        """True when another process than worker 0 serves `master`."""
        return self.master_keeper is not None

    def with_host_ranks(self) -> Role:
        """The role with this worker's host ranks, derived from `worker_endpoints`."""
        if self.index is None or not self.worker_endpoints:
            return self
        hosts = [host for host, _ in self.worker_endpoints]
        mine, order = hosts[self.index], list(dict.fromkeys(hosts))
        return self.replace(
            local_rank=hosts[: self.index].count(mine),
            local_size=hosts.count(mine),
            node_rank=order.index(mine),
            node_num=len(order),
            address=mine,
        )

    def replace(self, **changes: object) -> Role:
        """A copy with some facts changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def parse_endpoint(text: str, where: str) -> Endpoint:
    """Parse `host:port` or `[v6]:port`; `where` names the variable or flag in errors."""
    host, _, port = text.strip().rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    # a bare `a:b:80` or `::1:80` would be ambiguous
    if not _is_host(bare, bracketed=bare != host) or not _is_port(port):
        raise RoleError(
            f"{where}: got {text!r}, expected host:port with a port of 1 to 65535, "
            "and an IPv6 host in brackets"
        )
    return bare, int(port)


def endpoint_text(endpoint: Endpoint) -> str:
    """Format an endpoint; the inverse of `parse_endpoint`."""
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_host(host: str, *, bracketed: bool) -> bool:
    if not bracketed:
        return bool(host) and not any(c in "[]:/" or c.isspace() for c in host)
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and 0 < int(text) < 65536


def parse_endpoints(text: str, where: str) -> tuple[Endpoint, ...]:
    """Parse a comma-separated list of endpoints."""
    return tuple(parse_endpoint(part, where) for part in text.split(",") if part.strip())
