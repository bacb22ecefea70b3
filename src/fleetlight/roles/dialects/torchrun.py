# SPDX-License-Identifier: Apache-2.0
"""The variables of `torchrun` and of launchers that imitate it (Kubeflow, SageMaker, ...)."""

from __future__ import annotations

from fleetlight.roles.dialect import Dialect, Variables
from fleetlight.roles.role import Role

NAME = "torchrun (RANK, WORLD_SIZE)"


def _read(v: Variables) -> Role:
    worker_num = v.number("WORLD_SIZE")
    # a single worker needs no master
    meets = worker_num > 1 or (v.any("MASTER_ADDR") and v.any("MASTER_PORT"))
    # torchrun's agent serves the store; its workers only connect to it
    has_agent = v.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Role(
        dialect=NAME,
        index=v.number("RANK"),
        worker_num=worker_num,
        master=v.endpoint("MASTER_ADDR", "MASTER_PORT") if meets else None,
        master_keeper="the launcher's store" if has_agent else None,
        local_rank=v.number_or("LOCAL_RANK", None),
        local_size=v.number_or("LOCAL_WORLD_SIZE", None),
        node_rank=v.number_or("GROUP_RANK", None),
        node_num=v.number_or("GROUP_WORLD_SIZE", None),
        restart=v.number_or("TORCHELASTIC_RESTART_COUNT", 0) or 0,
    )


DIALECT = Dialect(
    name=NAME,
    precedence=1,
    reader=_read,
    # Slurm scripts often export WORLD_SIZE alone
    marks=("RANK",),
    unstated=("server_num",),
    kept_from_children=(
        r"RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK"
        r"|ROLE_NAME|ROLE_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*"
    ),
)
