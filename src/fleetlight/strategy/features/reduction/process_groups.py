# SPDX-License-Identifier: Apache-2.0
"""What carries the buckets: process groups, or shared memory."""

from __future__ import annotations

from fleetlight.errors import counted
from fleetlight.strategy.effects import effect_of
from fleetlight.strategy.feature import Feature
from fleetlight.strategy.features.reduction.data_parallel import reduction_switch, when_reducing
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, setting, settings_class


def _process_groups(strategy: ProcessGroupsFeature, job: JobFacts) -> Effect:
    count = strategy.nccl_comm_num
    if not job.is_collective:
        # which kind they are, and whether they are needed, turns out when the workers meet
        return True, f"{counted(count, 'process group')}, used where shared memory is not"
    by_levels = (
        strategy["use_hierarchical_allreduce"]
        and effect_of(strategy, "use_hierarchical_allreduce", job)[0]
    )
    if strategy.shared_memory and job.backend == "gloo" and job.node_num == 1 and not by_levels:
        return False, (
            "the workers of one host sum in shared memory, not through process groups; "
            "shared_memory=False lets buckets take turns over them"
        )
    if by_levels:
        return True, f"the leaders of the hosts have {counted(count, 'process group')}"
    if count == 1:
        return True, f"all buckets go through one {job.backend} process group"
    return True, f"buckets take turns over {count} {job.backend} process groups"


_collective_effect = reduction_switch(
    "shared_memory",
    "workers of one host sum in shared memory where they can",
    "all sums go through process groups",
)


def _shared_memory(strategy: ProcessGroupsFeature, job: JobFacts) -> Effect:
    if job.is_collective:
        return _collective_effect(strategy, job)
    if not job.server_num:
        return False, "the server is in the worker's process, and needs no connection"
    if not strategy.shared_memory:
        return True, "rows and gradients go through sockets"
    return True, "rows and gradients go through shared memory if the server is on the same host"


@settings_class
class ProcessGroupsFeature(Feature):
    """Process groups, and shared memory in their place."""

    nccl_comm_num: int = setting(
        1,
        "process groups that take turns at the buckets",
        effect=when_reducing(_process_groups),
        minimum=1,
    )
    shared_memory: bool = setting(
        True,
        "processes of one host exchange gradients and rows in shared memory",
        effect=_shared_memory,
    )
    sync_nccl_allreduce: bool = setting(
        False,
        "finish a bucket before starting the next",
        effect=reduction_switch(
            "sync_nccl_allreduce",
            "a bucket is finished before the next one starts",
            "buckets overlap with backward",
        ),
        variable="FLAGS_sync_nccl_allreduce",
    )
