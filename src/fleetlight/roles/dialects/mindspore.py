# SPDX-License-Identifier: Apache-2.0
"""The variables of MindSpore's CPU cluster, `MS_*`, in which a scheduler assigns the ranks."""

from __future__ import annotations

from fleetlight.errors import RoleError
from fleetlight.roles.dialect import Dialect, Variables
from fleetlight.roles.role import Kind, Role

NAME = "MS_*"

_KINDS = {"MS_SCHED": Kind.SCHEDULER, "MS_WORKER": Kind.WORKER, "MS_PSERVER": Kind.SERVER}


def _read(v: Variables) -> Role:
    text = v.text("MS_ROLE")
    if text not in _KINDS:
        raise RoleError(f"{NAME}: MS_ROLE={text!r}, expected one of {', '.join(_KINDS)}")
    kind = _KINDS[text]
    return Role(
        kind=kind,
        dialect=NAME,
        # the scheduler assigns the index when the job forms
        index=0 if kind is Kind.SCHEDULER else None,
        worker_num=v.number("MS_WORKER_NUM"),
        server_num=v.number_or("MS_SERVER_NUM", 0) or 0,
        master=v.endpoint("MS_SCHED_HOST", "MS_SCHED_PORT"),
        master_keeper=None if kind is Kind.SCHEDULER else "the scheduler",
        address=v.get("MS_WORKER_IP"),
        node_id=v.get("MS_NODE_ID"),
        deadline_s=v.seconds_or("MS_TOPO_TIMEOUT", None),
        deadline_variable="MS_TOPO_TIMEOUT",
    )


DIALECT = Dialect(
    name=NAME,
    precedence=3,
    reader=_read,
    marks=("MS_ROLE", "MS_SCHED_HOST", "MS_WORKER_NUM"),
    kept_from_children=r"MS_(ROLE|WORKER_NUM|SERVER_NUM|SCHED_HOST|SCHED_PORT|NODE_ID)",
)
