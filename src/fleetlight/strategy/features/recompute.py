# SPDX-License-Identifier: Apache-2.0
"""Recompute: backward computes activations of chosen modules again."""

from __future__ import annotations

from fleetlight.strategy.config_dicts import RecomputeConfigsDict
from fleetlight.strategy.feature import Feature
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, Nested, Settings, nested, setting, settings_class


def _recompute(strategy: RecomputeFeature, job: JobFacts) -> Effect:
    if strategy.recompute and not strategy.recompute_configs.checkpoints:
        return False, "recompute_configs.checkpoints names no module"
    return True, "the named modules store no activations" if strategy.recompute else "off"


@settings_class
class RecomputeConfigs(Settings):
    """The modules whose activations backward computes again.

    Example:
        >>> strategy = fleet.DistributedStrategy(recompute=True)
        >>> strategy.recompute_configs.checkpoints = ["layer1", "layer2"]
    """

    checkpoints: list[str] = setting([], "names of modules, such as ['layer1', 'layer2']")


@settings_class
class RecomputeFeature(Feature):
    """Activations that are computed again in backward."""

    recompute: bool = setting(False, "compute activations again in backward", effect=_recompute)
    recompute_configs: Nested[RecomputeConfigs, RecomputeConfigsDict] = nested(
        RecomputeConfigs, "which modules recompute"
    )
