# SPDX-License-Identifier: Apache-2.0
"""The durable state of servers and workers, as the strategy configures it."""

from __future__ import annotations

from pathlib import Path

from fleetlight.fleet.job import Job, durability_dir
from fleetlight.ps.journal.folder import is_of_launch, launch_of, refuse_another_size, remains
from fleetlight.ps.journal.journal import Policy
from fleetlight.ps.resume import Remains
from fleetlight.ps.server.durability.durability import Durable
from fleetlight.ps.worker.replay.step_journal import NoJournal, StepJournal
from fleetlight.ps.worker.replay.worker_journal import WorkerIdentity, WorkerJournal
from fleetlight.roles import Role
from fleetlight.strategy import DistributedStrategy


def durable_of(job: Job) -> Durable | None:
    """The durability of this process's server; None: it has none."""
    strategy, role = job.strategy, job.role
    if strategy.durability == "none":
        return None
    configs = strategy.durability_configs
    return Durable(
        path=job.durability_dir / _server_folder(role, strategy).name,
        log=strategy.durability == "log",
        job=role.job,
        start=role.restart,
        resume=asks_to_resume(role, strategy),
        # a job that saves can resume from its checkpoint instead
        must_exist=role.must_resume and not strategy.checkpoint,
        policy=Policy(configs.sync, patience_s=strategy.deadline_s),
        away_s=configs.away_within(strategy.deadline_s),
        snapshot_s=configs.snapshot_s,
        snapshot_bytes=int(configs.snapshot_mb * 2**20),
    )


def remains_of(role: Role, strategy: DistributedStrategy) -> Remains | None:
    """The state of this server from an earlier launch; None where no whole job resumes."""
    if strategy.durability == "none" or not asks_to_resume(role, strategy):
        return None
    path = _server_folder(role, strategy)
    if is_of_launch(path, launch_of(role.job, role.restart)):
        return None
    refuse_another_size(path, max(1, role.server_num), role.worker_num)
    return remains(path)


def asks_to_resume(role: Role, strategy: DistributedStrategy) -> bool:
    """True when the job resumes from the durable state of an earlier launch."""
    return role.resume or strategy.durability_configs.resume


def _server_folder(role: Role, strategy: DistributedStrategy) -> Path:
    index = role.index or 0 if role.is_server else 0
    return durability_dir(strategy) / f"server-{index}-of-{max(1, role.server_num)}"


def worker_journal_of(
    role: Role, strategy: DistributedStrategy, index: int, started_at: int
) -> StepJournal:
    """The journal of a worker; `NoJournal` where no later incarnation resumes from it.

    Workers that average dense gradients among themselves can only be restarted together.
    """
    if strategy.durability == "none" or strategy.a_sync_configs.dense != "servers":
        return NoJournal(started_at)
    identity = WorkerIdentity(
        worker=index,
        worker_num=role.worker_num,
        server_num=role.server_num,
        job=role.job,
        start=role.restart,
        started_at=started_at,
    )
    path = durability_dir(strategy) / f"worker-{index}-of-{role.worker_num}"
    return WorkerJournal(
        path,
        identity,
        strategy.deadline_s,
        resume=asks_to_resume(role, strategy),
        sync=strategy.durability_configs.sync == "commit",
    )
