# SPDX-License-Identifier: Apache-2.0
"""Settings that exclude each other, and why."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fleetlight.errors import StrategyError

if TYPE_CHECKING:
    from fleetlight.strategy.strategy import DistributedStrategy

Test = Callable[["DistributedStrategy"], bool]

#: the settings by which workers train alone for several steps
LOCAL = ("localsgd", "adaptive_localsgd", "diloco")


def check(strategy: DistributedStrategy) -> None:
    """Raise for the first two settings that cannot both hold."""
    for first, second, why in _pairs():
        if _TESTS[first](strategy) and _TESTS[second](strategy):
            raise StrategyError(
                f"strategy.{first} and strategy.{second} exclude each other: {why}; leave one out"
            )
    _check_bounds(strategy)


def _check_bounds(strategy: DistributedStrategy) -> None:
    """Of settings that are fine by themselves, but not in the order they are in."""
    configs = strategy.adaptive_localsgd_configs
    if strategy.adaptive_localsgd and configs.init_k_steps > configs.max_k_steps:
        raise StrategyError(
            f"strategy.adaptive_localsgd_configs: init_k_steps = {configs.init_k_steps} is more "
            f"than max_k_steps = {configs.max_k_steps}; raise max_k_steps or start with less"
        )


def check_away(strategy: DistributedStrategy, deadline_s: float) -> None:
    """Who waits for somebody that is away must have the patience for it."""
    configs = strategy.durability_configs
    if strategy.durability == "none" or configs.away_within(deadline_s) < deadline_s:
        return
    raise StrategyError(
        f"strategy.durability_configs: away_s = {configs.away_s:g} is not less than deadline_s = "
        f"{deadline_s:g}; whoever waits for a server or worker that is away gives up after "
        "deadline_s, and the job fails before away_s is over: raise deadline_s or lower away_s"
    )


def _pairs() -> Iterator[tuple[str, str, str]]:
    for first, second in itertools.combinations(LOCAL, 2):
        yield first, second, "each says when workers that train alone meet"
    for local in LOCAL:
        for other, why in _BESIDE_LOCAL.items():
            yield local, other, why
    yield from _COMPRESSING
    yield _SNAPSHOT, _STALENESS, _NEVER_CAUGHT_UP


def _on(name: str) -> Test:
    return lambda strategy: bool(getattr(strategy, name))


def _is_scaled(strategy: DistributedStrategy) -> bool:
    return strategy.amp and strategy.amp_configs.dtype == "float16"


_FLOAT16 = "amp_configs.dtype = 'float16'"
_SUM = "gradient_scale = 'sum'"
_UNUSED = "find_unused_parameters"
_SNAPSHOT = "durability = 'snapshot'"
_STALENESS = "a_sync_configs.staleness"

_TESTS: dict[str, Test] = {
    **{name: _on(name) for name in (*LOCAL, "dgc", "fp16_allreduce", "sync_batch_norm", _UNUSED)},
    _FLOAT16: _is_scaled,
    _SUM: lambda strategy: strategy.gradient_scale == "sum",
    "compression": lambda strategy: strategy.compression != "none",
    "compression = 'int8' or 'topk'": lambda s: s.compression in ("int8", "topk"),
    _SNAPSHOT: lambda strategy: strategy.durability == "snapshot",
    _STALENESS: lambda s: s.a_sync and s.a_sync_configs.staleness is not None,
}

_BESIDE_LOCAL = {
    "dgc": "DGC compresses the gradients of each step, and workers that train alone send none",
    "sync_batch_norm": "batch norm over all workers is a meeting in every forward",
    _SUM: "workers that train alone have no gradients to sum",
    _FLOAT16: (
        "its loss scaler leaves out steps on one worker and not on another; 'bfloat16' needs none"
    ),
}

_OWED = (
    "what was not sent is added to later gradients, whose loss scale is another; 'bfloat16' needs "
    "no loss scale"
)

_NEVER_PAID = "what a parameter is owed that no worker used in a step would be lost"

_NEVER_CAUGHT_UP = (
    "the steps that a server loses with its life would be waited for; durability = 'log' loses none"
)

_COMPRESSING = [
    ("compression", "fp16_allreduce", "both say in which form gradients travel"),
    ("dgc", "compression", "both say in which form gradients travel"),
    ("dgc", "fp16_allreduce", "both say in which form gradients travel"),
    ("dgc", _FLOAT16, _OWED),
    ("compression = 'int8' or 'topk'", _FLOAT16, _OWED),
    ("dgc", _UNUSED, _NEVER_PAID),
    ("compression = 'int8' or 'topk'", _UNUSED, _NEVER_PAID),
]
