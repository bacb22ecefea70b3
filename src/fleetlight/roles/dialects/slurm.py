# SPDX-License-Identifier: Apache-2.0
"""Slurm's variables, read only in an `srun` step of more than one task."""

from __future__ import annotations

import re

from fleetlight.errors import RoleError
from fleetlight.roles.dialect import Dialect, Variables
from fleetlight.roles.role import Role

NAME = "SLURM_*"

_FIRST_PORT, _PORTS = 15000, 15000

#: step ids from here on are no steps of `srun`, but batch scripts and shells of `salloc`
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def _is_step(v: Variables) -> bool:
    """True in a step of several tasks; a batch script or an interactive shell is no job."""
    try:
        step, tasks = v.number("SLURM_STEP_ID"), v.number("SLURM_STEP_NUM_TASKS")
    except RoleError:
        return False
    return step < _FIRST_SPECIAL_STEP and tasks > 1


def _read(v: Variables) -> Role:
    nodes = v.get("SLURM_STEP_NODELIST") or v.text("SLURM_JOB_NODELIST")
    # all tasks derive the same port; two steps of one job derive different ones
    step = v.number("SLURM_JOB_ID") * 7 + v.number("SLURM_STEP_ID")
    node_rank = v.number("SLURM_NODEID")
    return Role(
        dialect=NAME,
        index=v.number("SLURM_PROCID"),
        worker_num=v.number("SLURM_STEP_NUM_TASKS"),
        master=(first_host(nodes), _FIRST_PORT + step % _PORTS),
        local_rank=v.number("SLURM_LOCALID"),
        local_size=_tasks_on(v, node_rank),
        node_rank=node_rank,
        node_num=v.number_or("SLURM_STEP_NUM_NODES", None),
    )


def first_host(nodelist: str) -> str:
    """The first host of Slurm's compressed list, such as `node[03-05,9],login`."""
    first = re.match(r"([^,\[\]]|\[\d+[^\[\]]*\])+", nodelist)
    if first is None:
        raise RoleError(f"{NAME}: got node list {nodelist!r}, expected a list like node[1-3]")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _tasks_on(v: Variables, node_rank: int) -> int | None:
    """The number of tasks on one node, from a run-length list such as `2(x3),1`."""
    for part in (v.get("SLURM_STEP_TASKS_PER_NODE") or "").split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part)
        if match is None:
            return None
        if node_rank < (nodes := int(match[2] or 1)):
            return int(match[1])
        node_rank -= nodes
    return None


DIALECT = Dialect(name=NAME, precedence=4, reader=_read, detector=_is_step, is_fallback=True)
