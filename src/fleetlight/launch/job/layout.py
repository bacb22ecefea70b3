# SPDX-License-Identifier: Apache-2.0
"""The machines of a job in rank order, and the processes on each."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Sequence
from typing import Any

from fleetlight.errors import MembershipError
from fleetlight.launch.job.spec import RendezvousSpec
from fleetlight.roles.role import Endpoint, Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """One machine, as its launcher describes it to the other launchers."""

    host: str
    workers: tuple[Endpoint, ...] = ()
    servers: tuple[Endpoint, ...] = ()
    #: a port reserved in case worker 0 runs here
    master_port: int = 0
    rank: int | None = None
    collective: bool = True
    #: (name, value) pairs that must be equal on all machines
    agreed: tuple[tuple[str, str], ...] = ()
    #: (name, value) pairs that should be equal
    noted: tuple[tuple[str, str], ...] = ()
    #: how often this machine has restarted its processes, and how often after a failure
    restart: int = 0
    failures: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the wire."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Node:
        """The inverse of `to_dict`; accepts lists for tuples, as from JSON."""
        names = ("workers", "servers", "agreed", "noted")
        return cls(**{**data, **{name: tuple(map(tuple, data[name])) for name in names}})


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobProcess:
    """One process of the job."""

    kind: Kind
    #: -1 while only the job knows it
    index: int
    of: int
    local_rank: int
    local_size: int
    device: int | None = None

    @property
    def name(self) -> str:
        """`worker 1`"""
        return f"{self.kind.value} {self.index}"

    @property
    def title(self) -> str:
        """`worker 1 of 2`"""
        return f"{self.name} of {self.of}" if self.index >= 0 else self.kind.value

    @property
    def log_name(self) -> str:
        """`workerlog.1`"""
        return f"{self.kind.value}log.{self.index}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobLayout:
    """The whole job. Ranks are contiguous on each machine."""

    nodes: tuple[Node, ...]
    own: int = 0

    @property
    def master(self) -> Endpoint:
        """The endpoint at which worker 0 serves the job's store."""
        first = next(node for node in self.nodes if node.workers)
        return first.host, first.master_port

    @property
    def workers(self) -> tuple[Endpoint, ...]:
        """The endpoints of all workers in index order."""
        return tuple(endpoint for node in self.nodes for endpoint in node.workers)

    @property
    def servers(self) -> tuple[Endpoint, ...]:
        """The endpoints of all servers in index order."""
        return tuple(endpoint for node in self.nodes for endpoint in node.servers)

    @property
    def restart(self) -> int:
        """How often the job has restarted, even for a machine that joined later."""
        return max(node.restart for node in self.nodes)

    @property
    def failures(self) -> int:
        """How many earlier starts ended in a failure."""
        return max(node.failures for node in self.nodes)

    @property
    def node(self) -> Node:
        """This machine."""
        return self.nodes[self.own]

    def node_name(self, rank: int) -> str:
        """`node 1 (10.0.0.2)`"""
        return f"node {rank} ({self.nodes[rank].host})"

    def members(self, devices: Sequence[int] = ()) -> list[JobProcess]:
        """The processes of this machine: servers first, because workers wait for them."""
        before = self.nodes[: self.own]
        servers = _members(
            Kind.SERVER,
            first=sum(len(node.servers) for node in before),
            count=len(self.node.servers),
            of=len(self.servers),
        )
        workers = _members(
            Kind.WORKER,
            first=sum(len(node.workers) for node in before),
            count=len(self.node.workers),
            of=len(self.workers),
            devices=devices,
        )
        return servers + workers


def _members(
    kind: Kind, *, first: int, count: int, of: int, devices: Sequence[int] = ()
) -> list[JobProcess]:
    return [
        JobProcess(
            kind=kind,
            index=first + local,
            of=of,
            local_rank=local,
            local_size=count,
            device=devices[local] if devices else None,
        )
        for local in range(count)
    ]


def check(nodes: Sequence[Node]) -> list[str]:
    """Return warnings about machines that differ; raise MembershipError if they do not fit."""
    first = nodes[0]
    for node in nodes[1:]:
        for (what, mine), (_, theirs) in zip(first.agreed, node.agreed, strict=True):
            if mine != theirs:
                raise MembershipError(
                    f"the machines do not match: {what} is {mine} on {first.host} but "
                    f"{theirs} on {node.host}; make them equal"
                )
    if not any(node.workers for node in nodes):
        raise MembershipError("no machine has a worker; pass --worker_num N on at least one")
    if not first.collective and not any(node.servers for node in nodes):
        raise MembershipError("no machine has a server; pass --server_num N on at least one")
    return _differences(nodes)


def _differences(nodes: Sequence[Node]) -> list[str]:
    warnings = []
    for values in zip(*(node.noted for node in nodes), strict=True):
        if len(set(values)) > 1:
            values_by_host = ", ".join(
                f"{n.host}: {v}" for n, (_, v) in zip(nodes, values, strict=True)
            )
            warnings.append(
                f"warning: the {values[0][0]} differs between the machines ({values_by_host})"
            )
    return warnings


def ordered(nodes: Sequence[Node], spec: RendezvousSpec) -> tuple[Node, ...]:
    """The nodes as the user listed them, else by requested rank, master first, and address."""
    if spec.hosts:
        hosts = [node.host for node in nodes]
        if sorted(hosts) != sorted(spec.hosts):
            raise MembershipError(
                f"got the machines {', '.join(hosts)}, expected {', '.join(spec.hosts)}; start "
                "fleetrun once on each"
            )
        return tuple(sorted(nodes, key=lambda node: spec.hosts.index(node.host)))
    asked = [node.rank for node in nodes if node.rank is not None]
    twice = sorted({rank for rank in asked if asked.count(rank) > 1})
    if twice:
        raise MembershipError(f"two machines have --rank {twice[0]}; give each its own")
    return tuple(sorted(nodes, key=lambda node: _sort_key(node, spec.master[0], len(nodes))))


def _sort_key(node: Node, master: str, last: int) -> tuple[int, bool, bytes, int]:
    is_master = node.host == master
    wish = node.rank if node.rank is not None else 0 if is_master else last
    return wish, not is_master, ipaddress.ip_address(node.host).packed, node.master_port
