# SPDX-License-Identifier: Apache-2.0
"""Automatic mixed precision."""

from __future__ import annotations

from fleetlight.strategy.config_dicts import AmpConfigsDict
from fleetlight.strategy.feature import Chosen, Feature
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import (
    Effect,
    EffectRule,
    Nested,
    Settings,
    nested,
    setting,
    settings_class,
)

FLOAT16 = Chosen("amp_configs.dtype", ("float16",))


def _amp(strategy: AmpFeature, job: JobFacts) -> Effect:
    return True, f"autocast to {strategy.amp_configs.dtype}" if strategy.amp else "off"


def _loss_scale(sentence: str) -> EffectRule:
    """A rule of float16, whose small gradients vanish without a scale."""

    def rule(strategy: AmpFeature, job: JobFacts) -> Effect:
        if strategy.amp_configs.dtype == "bfloat16":
            return False, "bfloat16 needs no loss scale"
        return True, sentence

    return rule


@settings_class
class AmpConfigs(Settings):
    """Automatic mixed precision around the model's forward.

    Example:
        >>> strategy = fleet.DistributedStrategy(amp=True, amp_configs={"dtype": "float16"})
        >>> strategy.amp_configs.init_loss_scaling
        65536.0
    """

    dtype: str = setting("bfloat16", "what autocast computes in", choices=("bfloat16", "float16"))
    init_loss_scaling: float = setting(
        65536.0,
        "first loss scale of float16",
        effect=_loss_scale("first loss scale of float16"),
        above=0,
    )
    use_dynamic_loss_scaling: bool = setting(
        True,
        "adapt the loss scale of float16",
        effect=_loss_scale("adapt the loss scale of float16"),
    )


@settings_class
class AmpFeature(Feature):
    """Autocast around the model's forward."""

    amp: bool = setting(False, "autocast around the model's forward", effect=_amp)
    amp_configs: Nested[AmpConfigs, AmpConfigsDict] = nested(
        AmpConfigs, "what autocast computes in"
    )
