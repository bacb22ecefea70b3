# SPDX-License-Identifier: Apache-2.0
"""Where workers all-reduce gradients, and whether a link between hosts is spared thereby."""

from __future__ import annotations

from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, EffectRule, Settings

NO_LINK = "all workers are on one host, so nothing crosses a link that could be spared"


def when_reducing(rule: EffectRule) -> EffectRule:
    """A rule that needs workers that all-reduce their gradients."""

    def both(strategy: Settings, job: JobFacts) -> Effect:
        if not all_reduces(strategy, job):
            return False, "gradients go to the parameter servers, not through an all-reduce"
        if job.worker_num == 1:
            return False, "one worker has nobody to reduce with"
        return rule(strategy, job)

    return both


def all_reduces(strategy: Settings, job: JobFacts) -> bool:
    """True where workers all-reduce gradients: of everything, or of what no server keeps."""
    return job.is_collective or strategy["a_sync_configs.dense"] == "allreduce"


def spares_link(strategy: Settings, job: JobFacts, *, coded: bool) -> bool:
    """False where workers are on one host, and another form of gradients spares no link.

    NCCL has no shared memory to sum in, so narrow types may be of use there.
    """
    if not job.is_collective or job.node_num > 1 or not strategy["shared_memory"]:
        return True
    return job.backend != "gloo" and not coded
