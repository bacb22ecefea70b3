# SPDX-License-Identifier: Apache-2.0
"""The variables of MindSpore's CPU cluster, `MS_*`: a scheduler hands out the ranks."""

from __future__ import annotations

from fleetlight.errors import RoleError
from fleetlight.roles.dialect import Environment, Variables
from fleetlight.roles.role import Kind, Role

NAME = "MS_*"

_KINDS = {"MS_SCHED": Kind.SCHEDULER, "MS_WORKER": Kind.WORKER, "MS_PSERVER": Kind.SERVER}


def present(env: Environment) -> bool:
    """True when one of the variables that make this dialect is set."""
    return Variables(env, NAME).any("MS_ROLE", "MS_SCHED_HOST", "MS_WORKER_NUM")


def read(env: Environment) -> Role:
    """The role these variables describe; the scheduler tells the index later."""
    v = Variables(env, NAME)
    text = v.text("MS_ROLE")
    if text not in _KINDS:
        raise RoleError(f"{NAME}: MS_ROLE={text!r}, expected one of {', '.join(_KINDS)}")
    kind = _KINDS[text]
    return Role(
        kind=kind,
        dialect=NAME,
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
