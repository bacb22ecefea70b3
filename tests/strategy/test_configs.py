# SPDX-License-Identifier: Apache-2.0
"""The nested configs: limits that the general rules do not show."""

from __future__ import annotations

from typing import Any

import pytest

from fleetlight.errors import StrategyError
from fleetlight.strategy import configs


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (configs.ASyncConfigs, "k_steps", -1),
        (configs.ASyncConfigs, "staleness", -1),
        (configs.ASyncConfigs, "send_queue_size", 0),
        (configs.ASyncConfigs, "max_merge", 0),
        (configs.LocalSGDConfigs, "k_steps", 0),
        (configs.LocalSGDConfigs, "begin_step", -1),
        (configs.LocalSGDConfigs, "optimizer_state", "drop"),
        (configs.LocalSGDConfigs, "buffers", "keep"),
        (configs.AdaptiveLocalSGDConfigs, "init_k_steps", 0),
        (configs.AdaptiveLocalSGDConfigs, "max_k_steps", 0),
        (configs.DiLoCoConfigs, "k_steps", 0),
        (configs.DiLoCoConfigs, "outer_lr", 0.0),
        (configs.DiLoCoConfigs, "outer_momentum", -0.1),
        (configs.DiLoCoConfigs, "outer_momentum", 1.1),
        (configs.DGCConfigs, "rampup_begin_step", -1),
        (configs.DGCConfigs, "rampup_step", 0),
        (configs.DGCConfigs, "sparsity", ["0.9"]),
        (configs.DGCConfigs, "sparsity", []),
        (configs.DGCConfigs, "sparsity", [0.5, 1.0]),
        (configs.DGCConfigs, "sparsity", [-0.1]),
        (configs.DGCConfigs, "sparsity", [float("nan")]),
        (configs.DGCConfigs, "local_grad_clip_norm", 0),
        (configs.DGCConfigs, "min_size", 0),
        (configs.CompressionConfigs, "ratio", 0),
        (configs.CompressionConfigs, "ratio", 1.1),
        (configs.CompressionConfigs, "min_size", 0),
        (configs.CompressionConfigs, "exclude", "layer1"),
        (configs.GradientMergeConfigs, "k_steps", 0),
        (configs.GradientMergeConfigs, "avg", 1),
        (configs.AmpConfigs, "dtype", "float32"),
        (configs.AmpConfigs, "init_loss_scaling", 0.0),
        (configs.AmpConfigs, "use_dynamic_loss_scaling", 1),
        (configs.RecomputeConfigs, "checkpoints", "layer1"),
        (configs.RecomputeConfigs, "checkpoints", [1]),
        (configs.CheckpointConfigs, "every_s", -1.0),
        (configs.CheckpointConfigs, "every_steps", -1),
        (configs.CheckpointConfigs, "via", "worker1"),
        (configs.CheckpointConfigs, "grace_s", 0.0),
        (configs.CheckpointConfigs, "resume", "yes"),
        (configs.ExecutionStrategy, "num_threads", 0),
        (configs.ExecutionStrategy, "num_iteration_per_drop_scope", 0),
    ],
)
def test_what_is_out_of_range_is_refused(config: Any, name: str, value: object) -> None:
    with pytest.raises(StrategyError, match=rf"{config.CALLED}\.{name}"):
        config(**{name: value})
