# SPDX-License-Identifier: Apache-2.0
"""What the strategy says of how servers and workers outlive their process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetlight.fleet.context import kept_in
from fleetlight.ps.journal.journal import Policy
from fleetlight.ps.server.durability import Durable
from fleetlight.ps.worker.redo.redo import Identity, Redo

if TYPE_CHECKING:
    from fleetlight.fleet.context import Context
    from fleetlight.roles import Role
    from fleetlight.strategy import DistributedStrategy


def durable_of(context: Context) -> Durable | None:
    """How this process keeps the values of its server; None: it does not."""
    strategy, role = context.strategy, context.role
    if strategy.durability == "none":
        return None
    configs = strategy.durability_configs
    index = role.index if role.is_server else 0
    name = f"server-{index}-of-{max(1, role.server_num)}"
    return Durable(
        path=context.kept_in / name,
        log=strategy.durability == "log",
        job=role.job,
        start=role.restart,
        resume=configs.resume or role.resume,
        # a job that saves has its checkpoint to go on from
        must_exist=role.resume and not strategy.checkpoint,
        policy=Policy(configs.sync, patience_s=strategy.deadline_s),
        away_s=configs.away_within(strategy.deadline_s),
        snapshot_s=configs.snapshot_s,
        snapshot_bytes=int(configs.snapshot_mb * 2**20),
    )


def redo_of(role: Role, strategy: DistributedStrategy, index: int, incarnation: int) -> Redo | None:
    """What a worker keeps of itself; None where nobody would start it again alone.

    Workers that average dense gradients among themselves can only be started again together.
    """
    is_kept = strategy.durability != "none" and strategy.a_sync_configs.dense == "servers"
    if not is_kept or not role.job or role.max_restarts == 0:
        return None
    identity = Identity(
        worker=index,
        worker_num=role.worker_num,
        server_num=role.server_num,
        job=role.job,
        start=role.restart,
        incarnation=incarnation,
    )
    path = kept_in(strategy) / f"worker-{index}-of-{role.worker_num}"
    return Redo(path, identity, strategy.deadline_s)
