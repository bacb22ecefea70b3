# SPDX-License-Identifier: Apache-2.0
"""Fleetlight's own variables, `FLEET_*`, which fleetrun sets."""

from __future__ import annotations

from fleetlight.errors import RoleError
from fleetlight.roles.dialect import Dialect, Variables
from fleetlight.roles.role import Kind, Role, parse_endpoint, parse_endpoints

NAME = "FLEET_*"


def _read(v: Variables) -> Role:
    kind = _kind(v.text("FLEET_ROLE"))
    worker_num = v.number("FLEET_WORKER_NUM")
    master = v.get("FLEET_MASTER")
    if master is None and worker_num > 1:
        raise RoleError(f"{NAME}: FLEET_MASTER is not set, but {worker_num} workers must meet")
    return Role(
        kind=kind,
        dialect=NAME,
        index=_index(v, kind),
        master_keeper="the scheduler" if _has_scheduler(v, kind) else None,
        worker_num=worker_num,
        server_num=v.number_or("FLEET_SERVER_NUM", 0) or 0,
        master=parse_endpoint(master, "FLEET_MASTER") if master else None,
        worker_endpoints=parse_endpoints(
            v.get("FLEET_WORKER_ENDPOINTS") or "", "FLEET_WORKER_ENDPOINTS"
        ),
        server_endpoints=parse_endpoints(
            v.get("FLEET_SERVER_ENDPOINTS") or "", "FLEET_SERVER_ENDPOINTS"
        ),
        local_rank=v.number_or("FLEET_LOCAL_RANK", None),
        local_size=v.number_or("FLEET_LOCAL_SIZE", None),
        node_rank=v.number_or("FLEET_NODE_RANK", None),
        node_num=v.number_or("FLEET_NODE_NUM", None),
        address=v.get("FLEET_HOST"),
        device=v.number_or("FLEET_DEVICE", None),
        restart=v.number_or("FLEET_RESTART", 0) or 0,
    )


def _kind(text: str) -> Kind:
    kinds = {kind.value: kind for kind in Kind}
    if text.lower() not in kinds:
        raise RoleError(f"{NAME}: FLEET_ROLE={text!r}, expected one of {', '.join(kinds)}")
    return kinds[text.lower()]


def _has_scheduler(v: Variables, kind: Kind) -> bool:
    """True for a member of a job with a scheduler."""
    return kind is not Kind.SCHEDULER and bool(v.number_or("FLEET_SCHEDULER_NUM", 0))


def _index(v: Variables, kind: Kind) -> int | None:
    """The index of this process; None if the scheduler assigns it."""
    if kind is Kind.SCHEDULER:
        return 0
    if _has_scheduler(v, kind):
        return v.number_or("FLEET_INDEX", None)
    return v.number("FLEET_INDEX")


DIALECT = Dialect(
    name=NAME, precedence=0, reader=_read, marks=("FLEET_ROLE", "FLEET_INDEX", "FLEET_WORKER_NUM")
)
