# SPDX-License-Identifier: Apache-2.0
"""Hierarchical all-reduce: workers of one host sum first, one of each host meets the others."""

from __future__ import annotations

from fleetlight.strategy.effects import follows
from fleetlight.strategy.feature import Feature
from fleetlight.strategy.features.reduction.compression import sends_codes
from fleetlight.strategy.features.reduction.data_parallel import when_reducing
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, setting, settings_class


def _hierarchy(strategy: HierarchyFeature, job: JobFacts) -> Effect:
    inner = strategy.hierarchical_allreduce_inter_nranks
    if not strategy.use_hierarchical_allreduce:
        return True, "off: all workers take part in one all-reduce"
    if not job.is_collective:
        return True, "where workers share hosts, those of one sum first"
    if job.backend != "gloo" and not sends_codes(strategy, job):
        return False, "it is for CPUs: on GPUs NCCL finds its own way through the hosts"
    if job.node_num == 1 and not 1 < inner < job.worker_num:
        return False, "all workers are on one host, so there is no link between hosts to spare"
    if job.node_num == job.worker_num:
        return False, "every host has one worker, so there is nothing to sum inside"
    return True, "workers of one host sum first, and one of each host meets the others"


_all_of_a_host = follows("use_hierarchical_allreduce", "all workers of a host sum at once")


def _inner_group(strategy: HierarchyFeature, job: JobFacts) -> Effect:
    inner = strategy.hierarchical_allreduce_inter_nranks
    active, why = _all_of_a_host(strategy, job)
    if not active or inner == 0:
        return active, why
    if inner == 1:
        return False, "a group of one has nothing to sum, so all workers of a host sum at once"
    return True, f"up to {inner} workers, all of one host, sum first"


@settings_class
class HierarchyFeature(Feature):
    """Sums inside the hosts first."""

    use_hierarchical_allreduce: bool = setting(
        False, "reduce inside each host first", effect=when_reducing(_hierarchy)
    )
    hierarchical_allreduce_inter_nranks: int = setting(
        0,
        "workers of a host that form an inner group; 0: all of them",
        effect=when_reducing(_inner_group),
        minimum=0,
    )
