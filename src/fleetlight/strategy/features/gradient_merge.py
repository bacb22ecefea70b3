# SPDX-License-Identifier: Apache-2.0
"""Gradient merge: several backward passes make one optimizer step."""

from __future__ import annotations

from fleetlight.strategy.config_dicts import GradientMergeConfigsDict
from fleetlight.strategy.feature import Feature
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, Nested, Settings, nested, setting, settings_class


def _merge(strategy: GradientMergeFeature, job: JobFacts) -> Effect:
    if not strategy.gradient_merge:
        return True, "off: each backward makes a step"
    k = strategy.gradient_merge_configs.k_steps
    if k == 1:
        return False, "gradient_merge_configs.k_steps is 1: nothing to merge"
    return True, f"{k} backwards make one optimizer step, reduced once"


@settings_class
class GradientMergeConfigs(Settings):
    """How many backwards make one optimizer step.

    Example:
        >>> strategy = fleet.DistributedStrategy(gradient_merge=True)
        >>> strategy.gradient_merge_configs.k_steps = 4
    """

    k_steps: int = setting(1, "backwards that make one optimizer step", minimum=1)
    avg: bool = setting(True, "divide the merged gradient by k_steps")


@settings_class
class GradientMergeFeature(Feature):
    """Several backwards that make one optimizer step."""

    gradient_merge: bool = setting(
        False, "several backwards make one optimizer step", effect=_merge
    )
    gradient_merge_configs: Nested[GradientMergeConfigs, GradientMergeConfigsDict] = nested(
        GradientMergeConfigs, "how many backwards make a step"
    )
