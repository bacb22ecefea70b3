# SPDX-License-Identifier: Apache-2.0
"""What the strategy says of how servers outlive their process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fleetlight.ps.journal.journal import Policy
from fleetlight.ps.server.durability import Durable

if TYPE_CHECKING:
    from fleetlight.fleet.context import Context


def durable_of(context: Context) -> Durable | None:
    """How this process keeps the values of its server; None: it does not."""
    strategy, role = context.strategy, context.role
    if strategy.durability == "none":
        return None
    configs = strategy.durability_configs
    index = role.index if role.is_server else 0
    name = f"server-{index}-of-{max(1, role.server_num)}"
    return Durable(
        path=Path(configs.folder) / name,
        log=strategy.durability == "log",
        job=role.job,
        start=role.restart,
        resume=configs.resume or role.resume,
        policy=Policy(configs.sync, patience_s=strategy.deadline_s),
        snapshot_s=configs.snapshot_s,
        snapshot_bytes=int(configs.snapshot_mb * 2**20),
    )
