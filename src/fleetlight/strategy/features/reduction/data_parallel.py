# SPDX-License-Identifier: Apache-2.0
"""Data parallel training: where workers all-reduce gradients, and what else they share."""

from __future__ import annotations

from fleetlight.strategy.effects import always
from fleetlight.strategy.feature import Chosen, Feature
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, EffectRule, Settings, setting, settings_class

UNUSED = Chosen("find_unused_parameters")
SUM = Chosen("gradient_scale", ("sum",))
NO_LINK = "all workers are on one host, so no gradient crosses a link between hosts"


def when_reducing(rule: EffectRule) -> EffectRule:
    """Limit a rule to jobs whose workers all-reduce gradients."""

    def both(strategy: Settings, job: JobFacts) -> Effect:
        if not all_reduces(strategy, job):
            return False, "gradients go to the parameter servers, not through an all-reduce"
        if job.worker_num == 1:
            return False, "one worker has no other to reduce with"
        return rule(strategy, job)

    return both


def reduction_switch(name: str, on: str, off: str) -> EffectRule:
    """The rule of a switch of reductions: a sentence for on and one for off."""
    return when_reducing(lambda strategy, job: (True, on if strategy[name] else off))


def all_reduces(strategy: Settings, job: JobFacts) -> bool:
    """True where workers all-reduce gradients: all, or those of parameters not on servers."""
    return job.is_collective or strategy["a_sync_configs.dense"] == "allreduce"


def spares_link(strategy: Settings, job: JobFacts, *, coded: bool) -> bool:
    """False where workers share the memory of one host, so that a codec or cast saves nothing.

    NCCL does not sum in shared memory, so narrow types may help there.
    """
    if not job.is_collective or job.node_num > 1 or not strategy["shared_memory"]:
        return True
    return job.backend != "gloo" and not coded


def _buffers(strategy: DataParallelFeature, job: JobFacts) -> Effect:
    if job.worker_num == 1:
        return False, "one worker has no other to take buffers from"
    if not strategy.broadcast_buffers:
        return True, "each worker keeps its own buffers, such as batch norm's statistics"
    when = "before each forward that trains" if job.is_collective else "at the start"
    return True, f"the workers take worker 0's buffers {when}"


def _scale(strategy: DataParallelFeature, job: JobFacts) -> Effect:
    if not job.is_collective:
        return False, (
            "only a collective job can sum; with parameter servers, gradients of one step that "
            "come together are averaged"
        )
    return when_reducing(always(f"the {strategy.gradient_scale} over the workers"))(strategy, job)


@settings_class
class DataParallelFeature(Feature):
    """Buffers, batch norm, unused parameters and the scale of gradients."""

    sync_batch_norm: bool = setting(
        False,
        "batch norm over the batches of all workers",
        effect=reduction_switch(
            "sync_batch_norm",
            "statistics over the batches of all workers",
            "every worker normalises by its own batch",
        ),
    )
    broadcast_buffers: bool = setting(True, "the workers take worker 0's buffers", effect=_buffers)
    find_unused_parameters: bool = setting(
        False,
        "look for parameters that a forward did not use",
        effect=reduction_switch(
            "find_unused_parameters",
            "each backward looks for unused parameters",
            "every parameter must take part in every backward",
        ),
    )
    gradient_scale: str = setting(
        "mean", "what happens to the workers' gradients", effect=_scale, choices=("mean", "sum")
    )
