# SPDX-License-Identifier: Apache-2.0
"""This machine's part of the job: reserved ports, and the facts that launchers compare."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pathlib
import platform
from collections.abc import Iterator

from fleetlight.launch.inventory import version_of
from fleetlight.launch.job.layout import Node
from fleetlight.launch.job.spec import JobSpec, RendezvousSpec, RoleSpec
from fleetlight.launch.processes.ports import Reservation, reserve
from fleetlight.roles.role import Endpoint


def reserve_node(
    job: JobSpec, held: contextlib.ExitStack, *, restart: int = 0, failures: int = 0
) -> tuple[Node, list[Reservation]]:
    """Reserve ports for this machine's processes and describe it; `held` releases the ports."""
    here = job.machine
    listed = [
        Reservation(*endpoint, remedy=f"another port in {flag}")
        for flag, endpoints in (("--workers", here.workers), ("--servers", here.servers))
        for endpoint in endpoints
    ]
    free = reserve(here.host, job.processes - len(listed) + 1, here.start_port)
    reservations = [*listed, *free]
    for reservation in reservations:
        held.callback(reservation.close)
    ports = iter([reservation.port for reservation in free])
    node = Node(
        host=here.host,
        workers=here.workers or _endpoints(job.worker, here.host, ports),
        servers=here.servers or _endpoints(job.server, here.host, ports),
        master_port=next(ports),
        collective=job.collective,
        restart=restart,
        failures=failures,
    )
    return node, reservations


def _endpoints(role: RoleSpec, host: str, ports: Iterator[int]) -> tuple[Endpoint, ...]:
    return tuple((host, next(ports)) for _ in range(role.count))


def with_shared_facts(node: Node, job: JobSpec, spec: RendezvousSpec) -> Node:
    """The node with the facts that launchers compare at the rendezvous."""
    return dataclasses.replace(
        node,
        rank=spec.rank,
        agreed=(
            ("the number of machines", f"{spec.min_nodes}:{spec.max_nodes}"),
            ("--ips", ",".join(spec.hosts)),
            ("--max_restarts", str(job.max_restarts)),
            ("the kind of job", "collective" if job.collective else "parameter server"),
            *((f"the {name} version", version_of(name)) for name in ("fleetlight", "torch")),
        ),
        noted=(("script", script_hash(job)), ("python version", platform.python_version())),
    )


def script_hash(job: JobSpec) -> str:
    """A short hash of the script's bytes, or the name of a module."""
    if job.is_module:
        return job.script
    try:
        return hashlib.sha256(pathlib.Path(job.script).read_bytes()).hexdigest()[:12]
    except OSError:
        return "unreadable"
