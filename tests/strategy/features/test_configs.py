# SPDX-License-Identifier: Apache-2.0
"""Limits of nested configs that the general rules do not show."""

from typing import Any

import pytest
from tests.errors import refuses

from fleetlight import strategy
from fleetlight.errors import StrategyError


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (strategy.ASyncConfigs, "k_steps", -1),
        (strategy.ASyncConfigs, "staleness", -1),
        (strategy.ASyncConfigs, "send_queue_size", 0),
        (strategy.ASyncConfigs, "max_merge", 0),
        (strategy.LocalSGDConfigs, "k_steps", 0),
        (strategy.LocalSGDConfigs, "begin_step", -1),
        (strategy.LocalSGDConfigs, "optimizer_state", "drop"),
        (strategy.LocalSGDConfigs, "buffers", "keep"),
        (strategy.AdaptiveLocalSGDConfigs, "init_k_steps", 0),
        (strategy.AdaptiveLocalSGDConfigs, "max_k_steps", 0),
        (strategy.DiLoCoConfigs, "k_steps", 0),
        (strategy.DiLoCoConfigs, "outer_lr", 0.0),
        (strategy.DiLoCoConfigs, "outer_momentum", -0.1),
        (strategy.DiLoCoConfigs, "outer_momentum", 1.1),
        (strategy.DGCConfigs, "rampup_begin_step", -1),
        (strategy.DGCConfigs, "rampup_step", 0),
        (strategy.DGCConfigs, "sparsity", ["0.9"]),
        (strategy.DGCConfigs, "sparsity", []),
        (strategy.DGCConfigs, "sparsity", [0.5, 1.0]),
        (strategy.DGCConfigs, "sparsity", [-0.1]),
        (strategy.DGCConfigs, "sparsity", [float("nan")]),
        (strategy.DGCConfigs, "local_grad_clip_norm", 0),
        (strategy.DGCConfigs, "min_size", 0),
        (strategy.CompressionConfigs, "ratio", 0),
        (strategy.CompressionConfigs, "ratio", 1.1),
        (strategy.CompressionConfigs, "min_size", 0),
        (strategy.CompressionConfigs, "exclude", "layer1"),
        (strategy.GradientMergeConfigs, "k_steps", 0),
        (strategy.GradientMergeConfigs, "avg", 1),
        (strategy.AmpConfigs, "dtype", "float32"),
        (strategy.AmpConfigs, "init_loss_scaling", 0.0),
        (strategy.AmpConfigs, "use_dynamic_loss_scaling", 1),
        (strategy.RecomputeConfigs, "checkpoints", "layer1"),
        (strategy.RecomputeConfigs, "checkpoints", [1]),
        (strategy.CheckpointConfigs, "every_s", -1.0),
        (strategy.CheckpointConfigs, "every_steps", -1),
        (strategy.CheckpointConfigs, "via", "worker1"),
        (strategy.CheckpointConfigs, "grace_s", 0.0),
        (strategy.CheckpointConfigs, "resume", "yes"),
        (strategy.ExecutionStrategy, "num_threads", 0),
        (strategy.ExecutionStrategy, "num_iteration_per_drop_scope", 0),
    ],
)
def test_values_out_of_range_are_refused(config: Any, name: str, value: object) -> None:
    with refuses(StrategyError, f"{config.DOTTED_NAME}.{name}"):
        config(**{name: value})
