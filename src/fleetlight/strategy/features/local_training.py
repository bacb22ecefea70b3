# SPDX-License-Identifier: Apache-2.0
"""Local training for several steps before averaging: LocalSGD, adaptive LocalSGD, DiLoCo."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fleetlight.errors import StrategyError, counted
from fleetlight.strategy.config_dicts import (
    AdaptiveLocalSGDConfigsDict,
    DiLoCoConfigsDict,
    LocalSGDConfigsDict,
)
from fleetlight.strategy.feature import Checks, Chosen, Conflict, Conflicts, Feature
from fleetlight.strategy.features.amp import FLOAT16
from fleetlight.strategy.features.reduction.data_parallel import SUM
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, Nested, Settings, nested, setting, settings_class

#: the settings that make workers train locally for several steps
LOCAL_TRAINING = ("localsgd", "adaptive_localsgd", "diloco")

_EXCLUDED = {
    Chosen("dgc"): (
        "DGC compresses the gradients of each step, and workers that train locally send none"
    ),
    Chosen("sync_batch_norm"): "it communicates in each forward, and local training does not",
    SUM: "workers that train locally have no gradients to sum",
    FLOAT16: "its loss scaler skips steps on some workers only; 'bfloat16' needs none",
}


@settings_class
class AveragingConfigs(Settings):
    """What happens to other state when workers average their parameters.

    Example:
        >>> strategy = fleet.DistributedStrategy(localsgd=True)
        >>> strategy.localsgd_configs.optimizer_state = "average"
    """

    begin_step: int = setting(1, "workers average at each step up to this one", minimum=0)
    optimizer_state: str = setting(
        "keep",
        "what happens to momenta and other optimizer state at an averaging",
        choices=("keep", "average", "reset"),
    )
    buffers: str = setting(
        "average", "the batch norm statistics after an averaging", choices=("average", "rank0")
    )


def _conflicts_of(name: str) -> tuple[Conflict, ...]:
    """The conflicts of one of `LOCAL_TRAINING`, except with earlier ones."""
    later = LOCAL_TRAINING[LOCAL_TRAINING.index(name) + 1 :]
    return (
        *(
            Conflict(Chosen(name), Chosen(other), "each decides when workers average")
            for other in later
        ),
        *(Conflict(Chosen(name), other, why) for other, why in _EXCLUDED.items()),
    )


def _local_training(on: bool, k: int, begin_step: int, sentence: str, job: JobFacts) -> Effect:
    """The effect of a setting that makes workers train locally for up to k steps."""
    if not on:
        return True, "off: workers synchronize at each step"
    if not job.is_collective:
        return False, (
            "it is for collective jobs; with parameter servers, use a_sync_configs.k_steps "
            "(GeoSGD) for local training"
        )
    if job.worker_num == 1:
        return False, "the job has one worker"
    if k == 1:
        return False, "averaging after each step is synchronous training, which the job does anyway"
    return True, sentence + (f", from step {begin_step + 1} on" if begin_step > 1 else "")


def _localsgd(strategy: LocalSGDFeature, job: JobFacts) -> Effect:
    configs = strategy.localsgd_configs
    sentence = f"parameters are averaged every {counted(configs.k_steps, 'step')}"
    return _local_training(strategy.localsgd, configs.k_steps, configs.begin_step, sentence, job)


@settings_class
class LocalSGDConfigs(AveragingConfigs):
    """When workers of LocalSGD average their parameters.

    Example:
        >>> strategy = fleet.DistributedStrategy(localsgd=True)
        >>> strategy.localsgd_configs = {"k_steps": 8, "begin_step": 100}
    """

    k_steps: int = setting(1, "steps between two averagings", minimum=1)


@settings_class
class LocalSGDFeature(Feature):
    """LocalSGD, including its names of Fleet in fluid."""

    ALIASES: ClassVar = {
        "use_local_sgd": "localsgd",
        "local_sgd_steps": "localsgd_configs.k_steps",
        "local_sgd_is_warm_steps": "localsgd_configs.begin_step",
    }
    CONFLICTS: ClassVar[Conflicts] = _conflicts_of("localsgd")

    localsgd: bool = setting(False, "average parameters every k steps", effect=_localsgd)
    localsgd_configs: Nested[LocalSGDConfigs, LocalSGDConfigsDict] = nested(
        LocalSGDConfigs, "when LocalSGD averages"
    )

    if TYPE_CHECKING:  # the keys of ALIASES
        use_local_sgd: bool = False
        local_sgd_steps: int = 1
        local_sgd_is_warm_steps: int = 1


def _adaptive(strategy: AdaptiveLocalSGDFeature, job: JobFacts) -> Effect:
    configs = strategy.adaptive_localsgd_configs
    sentence = (
        f"parameters are averaged every {counted(configs.init_k_steps, 'step')} at first, then as "
        f"the loss falls, at most every {configs.max_k_steps}"
    )
    return _local_training(
        strategy.adaptive_localsgd, configs.max_k_steps, configs.begin_step, sentence, job
    )


def _check_bounds(strategy: AdaptiveLocalSGDFeature, job: JobFacts) -> None:
    configs = strategy.adaptive_localsgd_configs
    if strategy.adaptive_localsgd and configs.init_k_steps > configs.max_k_steps:
        raise StrategyError(
            f"strategy.adaptive_localsgd_configs: init_k_steps = {configs.init_k_steps} is more "
            f"than max_k_steps = {configs.max_k_steps}; raise max_k_steps or lower init_k_steps"
        )


@settings_class
class AdaptiveLocalSGDConfigs(AveragingConfigs):
    """The first and the largest number of local steps.

    Example:
        >>> strategy = fleet.DistributedStrategy(adaptive_localsgd=True)
        >>> strategy.adaptive_localsgd_configs.max_k_steps = 8
    """

    init_k_steps: int = setting(1, "steps between the first averagings", minimum=1)
    max_k_steps: int = setting(16, "most steps between two averagings", minimum=1)


@settings_class
class AdaptiveLocalSGDFeature(Feature):
    """LocalSGD whose k follows the loss."""

    CONFLICTS: ClassVar[Conflicts] = _conflicts_of("adaptive_localsgd")
    CHECKS: ClassVar[Checks] = (_check_bounds,)

    adaptive_localsgd: bool = setting(False, "LocalSGD whose k follows the loss", effect=_adaptive)
    adaptive_localsgd_configs: Nested[AdaptiveLocalSGDConfigs, AdaptiveLocalSGDConfigsDict] = (
        nested(AdaptiveLocalSGDConfigs, "where adaptive LocalSGD starts")
    )


def _diloco(strategy: DiLoCoFeature, job: JobFacts) -> Effect:
    configs = strategy.diloco_configs
    sentence = f"an outer step every {counted(configs.k_steps, 'step')}"
    # unlike averaging, an outer step has an effect even with k = 1
    return _local_training(
        strategy.diloco, max(2, configs.k_steps), configs.begin_step, sentence, job
    )


@settings_class
class DiLoCoConfigs(AveragingConfigs):
    """The outer optimizer of DiLoCo.

    Example:
        >>> strategy = fleet.DistributedStrategy(diloco=True)
        >>> strategy.diloco_configs.k_steps = 100
    """

    k_steps: int = setting(500, "inner steps between two outer steps", minimum=1)
    outer_lr: float = setting(0.7, "learning rate of the outer step", above=0)
    outer_momentum: float = setting(
        0.9, "Nesterov momentum of the outer step", minimum=0, maximum=1
    )


@settings_class
class DiLoCoFeature(Feature):
    """LocalSGD with an outer Nesterov step."""

    CONFLICTS: ClassVar[Conflicts] = _conflicts_of("diloco")

    diloco: bool = setting(False, "LocalSGD with an outer Nesterov step", effect=_diloco)
    diloco_configs: Nested[DiLoCoConfigs, DiLoCoConfigsDict] = nested(
        DiLoCoConfigs, "the outer step of DiLoCo"
    )
