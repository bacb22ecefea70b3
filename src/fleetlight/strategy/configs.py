# SPDX-License-Identifier: Apache-2.0
"""The nested configs of `DistributedStrategy`, one class per group of settings."""

from __future__ import annotations

from fleetlight.strategy.settings import Settings, setting, settings_class


@settings_class
class ASyncConfigs(Settings):
    """How workers and parameter servers exchange."""

    CALLED = "strategy.a_sync_configs"

    k_steps: int = setting(0, "0: every step; above 0: GeoSGD, every k steps", minimum=0)
    staleness: int | None = setting(
        None,
        "how many steps a worker may be ahead of the slowest",
        kind=int,
        minimum=0,
        optional=True,
    )
    send_queue_size: int = setting(
        4, "pushes that may wait to be sent; with dense values on servers only if set", minimum=1
    )
    max_merge: int = setting(1, "queued pushes that may travel as one", minimum=1)
    dense: str = setting(
        "servers", "who keeps dense parameters in step", choices=("servers", "allreduce")
    )
    on_nonfinite: str = setting(
        "refuse",
        "what a gradient with NaN or infinity does to its push",
        choices=("refuse", "skip", "apply"),
    )
    cache_rows: int = setting(
        4_000_000, "rows of a table that a worker of GeoSGD keeps at most", minimum=1
    )

    @property
    def has_queue(self) -> bool:
        """True where somebody asks for a queue of pushes, since they are merged only there."""
        return self.said("send_queue_size") or self.max_merge > 1


@settings_class
class AveragingConfigs(Settings):
    """What happens to state beside the parameters when workers that train alone meet."""

    begin_step: int = setting(1, "up to this step the workers meet at every step", minimum=0)
    optimizer_state: str = setting(
        "keep",
        "what becomes of momenta and the like when parameters are averaged",
        choices=("keep", "average", "reset"),
    )
    buffers: str = setting(
        "average", "whose statistics batch norm goes on with", choices=("average", "rank0")
    )


@settings_class
class LocalSGDConfigs(AveragingConfigs):
    """When the workers of LocalSGD average their parameters."""

    CALLED = "strategy.localsgd_configs"

    k_steps: int = setting(1, "steps between two averagings", minimum=1)


@settings_class
class AdaptiveLocalSGDConfigs(AveragingConfigs):
    """Where adaptive LocalSGD starts from, and how far it goes."""

    CALLED = "strategy.adaptive_localsgd_configs"

    init_k_steps: int = setting(1, "steps between the first averagings", minimum=1)
    max_k_steps: int = setting(16, "most steps between two averagings", minimum=1)


@settings_class
class DiLoCoConfigs(AveragingConfigs):
    """The outer optimizer of DiLoCo."""

    CALLED = "strategy.diloco_configs"

    k_steps: int = setting(500, "inner steps between two outer steps", minimum=1)
    outer_lr: float = setting(0.7, "learning rate of the outer step", above=0)
    outer_momentum: float = setting(
        0.9, "Nesterov momentum of the outer step", minimum=0, maximum=1
    )


@settings_class
class CompressionConfigs(Settings):
    """What int8 and top-k compression leave out, and what they send of the rest."""

    CALLED = "strategy.compression_configs"

    ratio: float = setting(
        0.01, "part of the values that topk sends; each takes twice its bytes", above=0, maximum=0.5
    )
    error_feedback: bool = setting(True, "what was not sent is added to the next gradient")
    min_size: int = setting(1024, "parameters with fewer values travel as they are", minimum=1)
    exclude: list[str] = setting([], "parameters, or modules, that travel as they are")


@settings_class
class DGCConfigs(Settings):
    """The sparsity schedule of DGC, and what surrounds it."""

    CALLED = "strategy.dgc_configs"

    rampup_begin_step: int = setting(0, "steps with dense gradients before it starts", minimum=0)
    rampup_step: int = setting(1, "steps over which the sparsity rises", minimum=1)
    sparsity: list[float] = setting(
        [0.999], "the sparsities to walk through", item=float, minimum=0, below=1, filled=True
    )
    local_grad_clip_norm: float | None = setting(
        None,
        "norm to which a gradient is clipped before it counts",
        kind=float,
        above=0,
        optional=True,
    )
    factor_masking: bool = setting(True, "what was sent also loses its momentum")
    min_size: int = setting(16384, "parameters with fewer values travel as they are", minimum=1)
    exclude: list[str] = setting([], "parameters, or modules, that travel as they are")


@settings_class
class GradientMergeConfigs(Settings):
    """How many backwards make one optimizer step."""

    CALLED = "strategy.gradient_merge_configs"

    k_steps: int = setting(1, "backwards that make one optimizer step", minimum=1)
    avg: bool = setting(True, "divide the merged gradient by k_steps")


@settings_class
class AmpConfigs(Settings):
    """Automatic mixed precision around the model's forward."""

    CALLED = "strategy.amp_configs"

    dtype: str = setting("bfloat16", "what autocast computes in", choices=("bfloat16", "float16"))
    init_loss_scaling: float = setting(65536.0, "first loss scale of float16", above=0)
    use_dynamic_loss_scaling: bool = setting(True, "adapt the loss scale of float16")


@settings_class
class RecomputeConfigs(Settings):
    """Which modules compute their activations again in backward instead of keeping them."""

    CALLED = "strategy.recompute_configs"

    checkpoints: list[str] = setting([], "names of modules, such as ['layer1', 'layer2']")


#: of a deadline: who waits for somebody that is away may have begun before
_PATIENT = 2 / 3


@settings_class
class DurabilityConfigs(Settings):
    """Where and how servers keep what outlives them."""

    CALLED = "strategy.durability_configs"

    folder: str = setting("durability", "where; each server has a folder of its own in it")
    sync: str = setting(
        "second",
        "when the disk has what was acknowledged: before that, within a second, or some time",
        choices=("commit", "second", "never"),
    )
    snapshot_s: float = setting(300.0, "seconds between two snapshots of all rows", above=0)
    snapshot_mb: float = setting(
        1024.0, "a snapshot is taken sooner where so many MiB were written since", above=0
    )
    away_s: float = setting(120.0, "how long a server or worker may be away", above=0, maximum=1e7)
    resume: bool = setting(False, "go on with what an earlier job has left")

    def away_within(self, deadline_s: float) -> float:
        """`away_s`, or less where nobody has set it and those that wait give up sooner."""
        return self.away_s if self.said("away_s") else min(self.away_s, deadline_s * _PATIENT)


@settings_class
class CheckpointConfigs(Settings):
    """When a job saves by itself, and what it does with what is there when it starts."""

    CALLED = "strategy.checkpoint_configs"

    every_s: float = setting(300.0, "seconds between two saves; 0: not by the clock", minimum=0)
    every_steps: int = setting(0, "optimizer steps between two saves; 0: not by steps", minimum=0)
    via: str = setting("folder", "how files of tables get there", choices=("folder", "worker0"))
    grace_s: float = setting(
        30.0, "how long a stop may take where no launcher watches over it", above=0, maximum=1e7
    )
    resume: bool = setting(False, "go on with what an earlier job has saved")


@settings_class
class SslConfigs(Settings):
    """What is asked of TLS beside the certificates."""

    CALLED = "strategy.ssl_configs"

    ciphers: str = setting(
        "", "the suites of TLS 1.3 to choose from, as 'A:B', the preferred first; '': OpenSSL's"
    )
    expiry_warning_days: int = setting(
        30, "days before its end that a certificate is warned about", minimum=0, maximum=36500
    )


@settings_class
class ExecutionStrategy(Settings):
    """How static programs run; `explain()` says what each setting means here."""

    CALLED = "strategy.execution_strategy"

    num_threads: int = setting(1, "threads that run operators", minimum=1)
    num_iteration_per_drop_scope: int = setting(10, "steps between memory clean-ups", minimum=1)
