# SPDX-License-Identifier: Apache-2.0
"""The nested configs as dicts, for type checkers and editors.

`python -m tests.strategy.written_dicts` writes this file from the fields of the configs.
"""

from __future__ import annotations

from typing import TypedDict


class ASyncConfigsDict(TypedDict, total=False):
    """The settings of `strategy.a_sync_configs`."""

    k_steps: int
    staleness: int | None
    send_queue_size: int
    max_merge: int
    dense: str
    on_nonfinite: str
    cache_rows: int
    table_wire: str
    table_dtype: str
    table_folder: str


class AdaptiveLocalSGDConfigsDict(TypedDict, total=False):
    """The settings of `strategy.adaptive_localsgd_configs`."""

    begin_step: int
    optimizer_state: str
    buffers: str
    init_k_steps: int
    max_k_steps: int


class AmpConfigsDict(TypedDict, total=False):
    """The settings of `strategy.amp_configs`."""

    dtype: str
    init_loss_scaling: float
    use_dynamic_loss_scaling: bool


class CheckpointConfigsDict(TypedDict, total=False):
    """The settings of `strategy.checkpoint_configs`."""

    every_s: float
    every_steps: int
    via: str
    grace_s: float
    keep: int
    base_every: int
    resume: bool


class CompressionConfigsDict(TypedDict, total=False):
    """The settings of `strategy.compression_configs`."""

    ratio: float
    error_feedback: bool
    min_size: int
    exclude: list[str]


class DGCConfigsDict(TypedDict, total=False):
    """The settings of `strategy.dgc_configs`."""

    rampup_begin_step: int
    rampup_step: int
    sparsity: list[float]
    local_grad_clip_norm: float | None
    factor_masking: bool
    min_size: int
    exclude: list[str]


class DiLoCoConfigsDict(TypedDict, total=False):
    """The settings of `strategy.diloco_configs`."""

    begin_step: int
    optimizer_state: str
    buffers: str
    k_steps: int
    outer_lr: float
    outer_momentum: float


class DurabilityConfigsDict(TypedDict, total=False):
    """The settings of `strategy.durability_configs`."""

    folder: str
    sync: str
    snapshot_s: float
    snapshot_mb: float
    away_s: float
    resume: bool


class ExecutionStrategyDict(TypedDict, total=False):
    """The settings of `strategy.execution_strategy`."""

    num_threads: int
    num_iteration_per_drop_scope: int


class GradientMergeConfigsDict(TypedDict, total=False):
    """The settings of `strategy.gradient_merge_configs`."""

    k_steps: int
    avg: bool


class LocalSGDConfigsDict(TypedDict, total=False):
    """The settings of `strategy.localsgd_configs`."""

    begin_step: int
    optimizer_state: str
    buffers: str
    k_steps: int


class RecomputeConfigsDict(TypedDict, total=False):
    """The settings of `strategy.recompute_configs`."""

    checkpoints: list[str]


class SslConfigsDict(TypedDict, total=False):
    """The settings of `strategy.ssl_configs`."""

    expiry_warning_days: int
