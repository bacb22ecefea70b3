# SPDX-License-Identifier: Apache-2.0
"""What the workers of a data-parallel job share: buffers, batch statistics, sums of gradients."""

from __future__ import annotations

from fleetlight.strategy.effects import always, either
from fleetlight.strategy.feature import Chosen, Feature
from fleetlight.strategy.features.reduction.all_reduce import when_reducing
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, setting, settings_class

UNUSED = Chosen("find_unused_parameters")
SUM = Chosen("gradient_scale", ("sum",))


def _buffers(strategy: DataParallelFeature, job: JobFacts) -> Effect:
    if job.worker_num == 1:
        return False, "one worker has nobody to take buffers from"
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
        effect=when_reducing(
            either(
                "sync_batch_norm",
                "statistics over the batches of all workers",
                "every worker normalises by its own batch",
            )
        ),
    )
    broadcast_buffers: bool = setting(True, "the workers take worker 0's buffers", effect=_buffers)
    find_unused_parameters: bool = setting(
        False,
        "look for parameters that a forward did not use",
        effect=when_reducing(
            either(
                "find_unused_parameters",
                "each backward looks for unused parameters",
                "every parameter must take part in every backward",
            )
        ),
    )
    gradient_scale: str = setting(
        "mean",
        "what happens to the workers' gradients",
        effect=_scale,
        choices=("mean", "sum"),
    )
