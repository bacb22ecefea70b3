# SPDX-License-Identifier: Apache-2.0
"""Gradient compression: the form of gradients between hosts."""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import ClassVar

from fleetlight.strategy.config_dicts import CompressionConfigsDict
from fleetlight.strategy.effects import effect_of
from fleetlight.strategy.feature import Chosen, Conflict, Conflicts, Feature
from fleetlight.strategy.features.amp import FLOAT16
from fleetlight.strategy.features.local_training import LOCAL_TRAINING
from fleetlight.strategy.features.reduction.data_parallel import (
    NO_LINK,
    UNUSED,
    spares_link,
    when_reducing,
)
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, Nested, Settings, nested, setting, settings_class

#: types to which gradients are cast, and summed as they are
CASTS = {"fp16": "float16", "bf16": "bfloat16"}
#: codecs, by the names of their files; to import one would load torch
CODECS = tuple(
    sorted(
        module.name
        for module in pkgutil.iter_modules(
            [str(Path(__file__).parents[3] / "collective" / "codecs" / "forms")]
        )
    )
)
#: the effects of some; {0}: workers or hosts, {1}: compression_configs.ratio
_EFFECTS = {
    "int8": "gradients cross between {0} as int8, with a scale for every block",
    "topk": "of the gradients, the {1} that are largest cross between {0}",
}

SAME_FORM = "both say in which form gradients travel"
NEEDS_ONE_SCALE = (
    "what was not sent is added to later gradients, whose loss scale is another; 'bfloat16' needs "
    "no loss scale"
)
FEEDBACK_LOST = "error feedback of a parameter that no worker uses in a step would be lost"

_MOVED = (
    "as bfloat16: to float16, what workers that train alone have moved by would often be nothing"
)


def _compression(strategy: CompressionFeature, job: JobFacts) -> Effect:
    codec = strategy.compression
    if codec == "none":
        return True, _other_form(strategy, "fp16_allreduce", "dgc")
    if not spares_link(strategy, job, coded=codec in CODECS):
        return False, NO_LINK
    if codec == "fp16" and _sends_movements(strategy, job):
        return True, _MOVED
    senders = "workers" if job.is_collective and job.node_num == 1 else "hosts"
    ordinary = f"gradients cross between {{0}} as {CASTS.get(codec, codec)}"
    sentence = _EFFECTS.get(codec, ordinary)
    return True, sentence.format(senders, percent(strategy.compression_configs.ratio))


def _compression_configs(strategy: CompressionFeature, job: JobFacts) -> Effect:
    if strategy.compression not in CODECS:
        return False, f"they are for {_CODED}"
    active, why = _compression(strategy, job)
    if not active:
        return False, f"compression has no effect: {why}"
    return True, "as compression says"


def _ratio(strategy: CompressionFeature, job: JobFacts) -> Effect:
    if strategy.compression == "int8":
        return False, "it is for compression = 'topk'; int8 sends all values"
    return True, f"topk sends {percent(strategy.compression_configs.ratio)} of the values"


def _fp16_allreduce(strategy: CompressionFeature, job: JobFacts) -> Effect:
    if strategy.fp16_allreduce is False:
        return True, _other_form(strategy, "compression", "dgc")
    if not spares_link(strategy, job, coded=False):
        return False, NO_LINK
    if strategy.fp16_allreduce == "bf16":
        return True, "as bfloat16"
    return True, _MOVED if _sends_movements(strategy, job) else "as float16"


def _other_form(strategy: Settings, *others: str) -> str:
    """The effect of a setting at its default, where another one may choose the form."""
    on = [name for name in others if Chosen(name).holds(strategy)]
    return f"as {on[0]} says" if on else "gradients travel in their own type"


def _sends_movements(strategy: Settings, job: JobFacts) -> bool:
    """True where workers train alone and send movements of parameters."""
    return any(strategy[name] and effect_of(strategy, name, job)[0] for name in LOCAL_TRAINING)


def sends_codes(strategy: Settings, job: JobFacts) -> bool:
    """True where gradients travel as messages of a codec, which use levels on GPUs as well."""
    asked = strategy["dgc"] or strategy["compression"] in CODECS
    return asked and spares_link(strategy, job, coded=True)


def percent(ratio: float) -> str:
    """`1 %` of 0.01."""
    return f"{100 * ratio:.4g} %"


_CODED = Chosen("compression", CODECS)


@settings_class
class CompressionConfigs(Settings):
    """What codecs send, and which parameters they cover.

    Example:
        >>> strategy = fleet.DistributedStrategy(compression="topk")
        >>> strategy.compression_configs.ratio = 0.05
    """

    ratio: float = setting(
        0.01,
        "part of the values that topk sends; each takes twice its bytes",
        effect=_ratio,
        above=0,
        maximum=0.5,
    )
    error_feedback: bool = setting(True, "what was not sent is added to the next gradient")
    min_size: int = setting(1024, "parameters with fewer values travel as they are", minimum=1)
    exclude: list[str] = setting([], "parameters, or modules, that travel as they are")


@settings_class
class CompressionFeature(Feature):
    """Compression by a codec, and Fleet's name for two casts."""

    CONFLICTS: ClassVar[Conflicts] = (
        Conflict(Chosen("compression"), Chosen("fp16_allreduce"), SAME_FORM),
        Conflict(_CODED, FLOAT16, NEEDS_ONE_SCALE),
        Conflict(_CODED, UNUSED, FEEDBACK_LOST),
    )

    fp16_allreduce: bool | str = setting(
        False,
        "send gradients as float16 (True) or bfloat16 ('bf16')",
        effect=when_reducing(_fp16_allreduce),
        kind=bool,
        choices=(False, True, "fp16", "bf16"),
    )
    compression: str = setting(
        "none",
        "in which form gradients cross between hosts",
        effect=when_reducing(_compression),
        choices=("none", *CASTS, *CODECS),
    )
    compression_configs: Nested[CompressionConfigs, CompressionConfigsDict] = nested(
        CompressionConfigs,
        "how much int8 and topk send, and of what",
        effect=when_reducing(_compression_configs),
    )
