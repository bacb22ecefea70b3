# SPDX-License-Identifier: Apache-2.0
"""Deep gradient compression."""

from __future__ import annotations

from typing import ClassVar

from fleetlight.errors import counted
from fleetlight.strategy.config_dicts import DGCConfigsDict
from fleetlight.strategy.feature import Chosen, Conflict, Conflicts, Feature
from fleetlight.strategy.features.amp import FLOAT16
from fleetlight.strategy.features.reduction.compression import (
    FEEDBACK_LOST,
    NEEDS_ONE_SCALE,
    SAME_FORM,
    percent,
)
from fleetlight.strategy.features.reduction.data_parallel import (
    NO_LINK,
    UNUSED,
    spares_link,
    when_reducing,
)
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, Nested, Settings, nested, setting, settings_class


def _dgc(strategy: DGCFeature, job: JobFacts) -> Effect:
    if not strategy.dgc:
        return True, "off: gradients are dense"
    if not job.is_collective:
        return False, (
            "it is for collective jobs, whose steps are the optimizer's own; with parameter "
            "servers, compression = 'topk' goes with dense gradients that are reduced"
        )
    if not spares_link(strategy, job, coded=True):
        return False, NO_LINK
    last = strategy.dgc_configs.sparsity[-1]
    return True, f"the largest {percent(1 - last)} of the gradients are sent"


def _rampup_step(strategy: DGCFeature, job: JobFacts) -> Effect:
    steps, levels = strategy.dgc_configs.rampup_step, strategy.dgc_configs.sparsity
    if len(levels) == 1:
        return False, "sparsity has one value, so nothing changes over the steps"
    return True, f"the {len(levels)} sparsities take effect over {counted(steps, 'step')}"


@settings_class
class DGCConfigs(Settings):
    """The sparsity schedule of DGC, and what surrounds it.

    Example:
        >>> strategy = fleet.DistributedStrategy(dgc=True)
        >>> strategy.dgc_configs.sparsity = [0.75, 0.9375, 0.999]
    """

    rampup_begin_step: int = setting(0, "steps with dense gradients before it starts", minimum=0)
    rampup_step: int = setting(
        1, "steps over which the sparsity rises", effect=_rampup_step, minimum=1
    )
    sparsity: list[float] = setting(
        [0.999], "the sparsities to walk through", item=float, minimum=0, below=1, filled=True
    )
    local_grad_clip_norm: float | None = setting(
        None,
        "norm to which a gradient is clipped before it counts",
        kind=float,
        above=0,
        optional=True,
    )
    factor_masking: bool = setting(True, "what was sent also loses its momentum")
    min_size: int = setting(16384, "parameters with fewer values travel as they are", minimum=1)
    exclude: list[str] = setting([], "parameters, or modules, that travel as they are")


@settings_class
class DGCFeature(Feature):
    """Deep gradient compression."""

    CONFLICTS: ClassVar[Conflicts] = (
        Conflict(Chosen("dgc"), Chosen("compression"), SAME_FORM),
        Conflict(Chosen("dgc"), Chosen("fp16_allreduce"), SAME_FORM),
        Conflict(Chosen("dgc"), FLOAT16, NEEDS_ONE_SCALE),
        Conflict(Chosen("dgc"), UNUSED, FEEDBACK_LOST),
    )

    dgc: bool = setting(False, "deep gradient compression", effect=when_reducing(_dgc))
    dgc_configs: Nested[DGCConfigs, DGCConfigsDict] = nested(
        DGCConfigs, "the sparsity schedule of DGC"
    )
