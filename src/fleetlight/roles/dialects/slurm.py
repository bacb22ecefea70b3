# SPDX-License-Identifier: Apache-2.0
"""Slurm's variables, read only in an `srun` step of more than one task."""

from __future__ import annotations

import re

from fleetlight.errors import RoleError
from fleetlight.roles.dialect import Dialect, Variables
from fleetlight.roles.placement import ServerRule, TaskPlace, expanded, places_of, runs
from fleetlight.roles.role import Kind, Role

NAME = "SLURM_*"

_FIRST_PORT, _PORTS = 15000, 15000

#: step ids from here on are no steps of `srun`, but batch scripts and shells of `salloc`
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

_RULES: dict[str, ServerRule] = {"spread": "spread", "pack": "pack"}
#: an entry of CUDA_VISIBLE_DEVICES that is a GPU
_IS_DEVICE = re.compile(r"\d+|GPU-.*|MIG-.*")


def _is_step(v: Variables) -> bool:
    """True in a step of several tasks; a batch script or an interactive shell is no job."""
    try:
        step, tasks = v.number("SLURM_STEP_ID"), v.number("SLURM_STEP_NUM_TASKS")
    except RoleError:
        return False
    return step < _FIRST_SPECIAL_STEP and tasks > 1


def _read(v: Variables) -> Role:
    nodes = v.get("SLURM_STEP_NODELIST") or v.text("SLURM_JOB_NODELIST")
    tasks, servers = v.number("SLURM_STEP_NUM_TASKS"), v.number_or("FLEET_SERVER_NUM", 0) or 0
    if servers >= tasks:
        raise RoleError(
            f"{NAME}: FLEET_SERVER_NUM={servers}, but the step has {tasks} tasks for servers and "
            f"workers; start more tasks (srun --ntasks {servers + 1}), or fewer servers"
        )
    job, step = v.number("SLURM_JOB_ID"), v.number("SLURM_STEP_ID")
    common = Role(
        dialect=NAME,
        worker_num=tasks - servers,
        server_num=servers,
        # all tasks derive the same port; two steps of one job derive different ones
        master=(first_host(nodes), _FIRST_PORT + (job * 7 + step) % _PORTS),
        node_num=v.number_or("SLURM_STEP_NUM_NODES", None),
        # a job that Slurm starts again keeps its id, and its steps count from 0 again
        job=f"slurm-{job}-{step}",
        restart=v.number_or("SLURM_RESTART_COUNT", 0) or 0,
    )
    role = _served(v, common, tasks) if servers else _collective(v, common)
    return role.replace(device=_device(v, role))


def _collective(v: Variables, common: Role) -> Role:
    """A worker of a job without servers: Slurm itself says where it is."""
    node_rank = v.number("SLURM_NODEID")
    return common.replace(
        index=v.number("SLURM_PROCID"),
        local_rank=v.number("SLURM_LOCALID"),
        local_size=_tasks_on(v, node_rank),
        node_rank=node_rank,
    )


def _served(v: Variables, common: Role, tasks: int) -> Role:
    """A server or worker: the numbers of all tasks decide which."""
    task, servers, rule = v.number("SLURM_PROCID"), common.server_num, _rule(v)
    if task >= tasks:
        raise RoleError(f"{NAME}: SLURM_PROCID={task}, expected 0 to {tasks - 1} for {tasks} tasks")
    place, why = _place(v, task, tasks, servers, rule)
    if place is not None:
        return common.replace(
            kind=place.kind,
            index=place.index,
            local_rank=place.local_rank,
            local_size=place.local_size,
            node_rank=place.node_rank,
            node_num=place.node_num,
        )
    if rule == "spread":
        raise RoleError(
            f"{NAME}: {why}, so this task does not know which tasks are servers; set "
            "FLEET_SERVERS=pack (the first tasks are servers), or use srun --distribution=block"
        )
    if task == 0 and v.number("SLURM_NODEID"):
        raise RoleError(
            f"{NAME}: {why}, and task 0 is not on the first node, where the processes meet; use "
            "srun --distribution=block"
        )
    # workers learn their place at the rendezvous
    is_server = task < servers
    return common.replace(
        kind=Kind.SERVER if is_server else Kind.WORKER,
        index=task if is_server else task - servers,
    )


def _rule(v: Variables) -> ServerRule:
    rule = (v.get("FLEET_SERVERS") or "spread").lower()
    if rule in _RULES:
        return _RULES[rule]
    raise RoleError(
        f"{NAME}: FLEET_SERVERS={rule!r}, expected spread (servers evenly over the nodes) or pack "
        "(the first tasks)"
    )


def _place(
    v: Variables, task: int, tasks: int, servers: int, rule: ServerRule
) -> tuple[TaskPlace | None, str]:
    """The place of this task, or why the variables do not give it."""
    # such as block:cyclic,pack; the first word is about nodes
    given = v.get("SLURM_DISTRIBUTION") or "block"
    distribution = re.split("[:,]", given.lower())[0]
    if distribution not in ("block", "cyclic"):
        return None, f"SLURM_DISTRIBUTION={given} does not say on which node each task is"
    per_node = expanded(_tasks_per_node(v), tasks)
    if per_node is None:
        return None, "SLURM_STEP_TASKS_PER_NODE is missing or does not fit SLURM_STEP_NUM_TASKS"
    places = places_of(per_node, "block" if distribution == "block" else "cyclic", servers, rule)
    place = places[task]
    node, local = v.number("SLURM_NODEID"), v.number("SLURM_LOCALID")
    if (place.node_rank, place.local_task) != (node, local):
        return None, (
            f"task {task} is task {local} of node {node}, but in the distribution {given} it is "
            f"task {place.local_task} of node {place.node_rank}"
        )
    return place, ""


def _device(v: Variables, role: Role) -> int | None:
    """The GPU of a worker among those that Slurm lets it see; None without GPUs."""
    visible = [one for one in (v.get("CUDA_VISIBLE_DEVICES") or "").split(",") if one.strip()]
    if not role.is_worker or not visible or not _IS_DEVICE.fullmatch(visible[0].strip()):
        return None
    # with --gpus-per-task each task sees its own
    return 0 if len(visible) == 1 else role.local_rank


def first_host(nodelist: str) -> str:
    """The first host of Slurm's compressed list, such as `node[03-05,9],login`."""
    first = re.match(r"([^,\[\]]|\[\d+[^\[\]]*\])+", nodelist)
    if first is None:
        raise RoleError(f"{NAME}: got node list {nodelist!r}, expected a list like node[1-3]")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _tasks_on(v: Variables, node_rank: int) -> int | None:
    """The number of tasks on one node."""
    for tasks, nodes in runs(_tasks_per_node(v)) or ():
        if node_rank < nodes:
            return tasks
        node_rank -= nodes
    return None


def _tasks_per_node(v: Variables) -> str:
    return v.get("SLURM_STEP_TASKS_PER_NODE") or ""


DIALECT = Dialect(name=NAME, precedence=4, reader=_read, detector=_is_step, is_fallback=True)
