# SPDX-License-Identifier: Apache-2.0
"""Buckets: how many gradients one all-reduce sums."""

from __future__ import annotations

from collections.abc import Callable

from fleetlight.strategy.feature import Feature
from fleetlight.strategy.features.reduction.data_parallel import reduction_switch, when_reducing
from fleetlight.strategy.job import JobFacts
from fleetlight.strategy.settings import Effect, EffectRule, setting, settings_class


def _fused(sentence: Callable[[FusionFeature], str]) -> EffectRule:
    """A rule of reductions that also needs fusion to be on."""

    def rule(strategy: FusionFeature, job: JobFacts) -> Effect:
        if not strategy.fuse_all_reduce_ops:
            return False, "fuse_all_reduce_ops is off: every gradient travels alone"
        return True, sentence(strategy)

    return when_reducing(rule)


def _most_gradients(strategy: FusionFeature) -> str:
    most = strategy.fuse_grad_size_in_num
    return f"a bucket holds up to {most} gradients" if most else _NO_LIMIT


_NO_LIMIT = "no limit on the gradients of a bucket"


@settings_class
class FusionFeature(Feature):
    """Fusion of gradients into buckets, with Fleet's variables for their size."""

    fuse_all_reduce_ops: bool = setting(
        True,
        "reduce gradients in buckets, not one by one",
        effect=reduction_switch(
            "fuse_all_reduce_ops", "gradients travel in buckets", "every gradient travels alone"
        ),
    )
    fuse_grad_size_in_MB: float = setting(
        25.0,
        "size of a bucket, in MiB",
        effect=_fused(lambda s: f"a bucket holds up to {s.fuse_grad_size_in_MB:g} MiB"),
        variable="FLAGS_fuse_parameter_memory_size",
        above=0,
    )
    fuse_grad_size_in_num: int = setting(
        0,
        "most gradients in a bucket; 0: only the size limits",
        effect=_fused(_most_gradients),
        variable="FLAGS_fuse_parameter_groups_size",
        minimum=0,
    )
