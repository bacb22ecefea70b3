# SPDX-License-Identifier: Apache-2.0
"""`DistributedStrategy`: every setting of a job, typed, validated, kept as TOML."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fleetlight.errors import NotAvailableError, StrategyError
from fleetlight.strategy import conflicts, effects, toml
from fleetlight.strategy.configs import (
    AdaptiveLocalSGDConfigs,
    AmpConfigs,
    ASyncConfigs,
    CheckpointConfigs,
    CompressionConfigs,
    DGCConfigs,
    DiLoCoConfigs,
    DurabilityConfigs,
    ExecutionStrategy,
    GradientMergeConfigs,
    LocalSGDConfigs,
    RecomputeConfigs,
    SslConfigs,
)
from fleetlight.strategy.job import JobFacts, current_job
from fleetlight.strategy.settings import Nested, Settings, nested, rules_of, setting, settings_class

if TYPE_CHECKING:
    from fleetlight.strategy.config_dicts import (
        AdaptiveLocalSGDConfigsDict,
        AmpConfigsDict,
        ASyncConfigsDict,
        CheckpointConfigsDict,
        CompressionConfigsDict,
        DGCConfigsDict,
        DiLoCoConfigsDict,
        DurabilityConfigsDict,
        ExecutionStrategyDict,
        GradientMergeConfigsDict,
        LocalSGDConfigsDict,
        RecomputeConfigsDict,
        SslConfigsDict,
    )

#: variables and the setting each one gives a default to: Fleet's for tuning, and fleetrun's own
FLAGS: Mapping[str, str] = {
    "FLAGS_fuse_parameter_memory_size": "fuse_grad_size_in_MB",
    "FLAGS_fuse_parameter_groups_size": "fuse_grad_size_in_num",
    "FLAGS_sync_nccl_allreduce": "sync_nccl_allreduce",
    "FLEET_SSL": "ssl",
    "FLEET_SSL_CIPHERS": "ssl_configs.ciphers",
    "FLEET_SSL_EXPIRY_WARNING_DAYS": "ssl_configs.expiry_warning_days",
    "FLEET_CHECKPOINT": "checkpoint",
}


@settings_class
class DistributedStrategy(Settings):
    """Every setting of a job. `explain()` tells which of them take effect in this one."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "use_local_sgd": "localsgd",
        "local_sgd_steps": "localsgd_configs.k_steps",
        "local_sgd_is_warm_steps": "localsgd_configs.begin_step",
        "exec_strategy": "execution_strategy",
    }

    a_sync: bool = setting(False, "parameter servers apply a push when it arrives")
    a_sync_configs: Nested[ASyncConfigs, ASyncConfigsDict] = nested(
        ASyncConfigs, "GeoSGD, staleness, queues"
    )
    localsgd: bool = setting(False, "average parameters every k steps")
    localsgd_configs: Nested[LocalSGDConfigs, LocalSGDConfigsDict] = nested(
        LocalSGDConfigs, "when LocalSGD averages"
    )
    adaptive_localsgd: bool = setting(False, "LocalSGD whose k follows the loss")
    adaptive_localsgd_configs: Nested[AdaptiveLocalSGDConfigs, AdaptiveLocalSGDConfigsDict] = (
        nested(AdaptiveLocalSGDConfigs, "where adaptive LocalSGD starts")
    )
    diloco: bool = setting(False, "LocalSGD with an outer Nesterov step")
    diloco_configs: Nested[DiLoCoConfigs, DiLoCoConfigsDict] = nested(
        DiLoCoConfigs, "the outer step of DiLoCo"
    )
    fuse_all_reduce_ops: bool = setting(True, "reduce gradients in buckets, not one by one")
    fuse_grad_size_in_MB: float = setting(25.0, "size of a bucket, in MiB", above=0)
    fuse_grad_size_in_num: int = setting(
        0, "most gradients in a bucket; 0: only the size limits", minimum=0
    )
    use_hierarchical_allreduce: bool = setting(False, "reduce inside each host first")
    hierarchical_allreduce_inter_nranks: int = setting(
        0, "workers of a host that form an inner group; 0: all of them", minimum=0
    )
    nccl_comm_num: int = setting(1, "process groups that take turns at the buckets", minimum=1)
    shared_memory: bool = setting(True, "workers of one host sum gradients in shared memory")
    sync_nccl_allreduce: bool = setting(False, "finish a bucket before starting the next")
    gradient_merge: bool = setting(False, "several backwards make one optimizer step")
    gradient_merge_configs: Nested[GradientMergeConfigs, GradientMergeConfigsDict] = nested(
        GradientMergeConfigs, "how many backwards make a step"
    )
    fp16_allreduce: bool | str = setting(
        False,
        "send gradients as float16 (True) or bfloat16 ('bf16')",
        kind=bool,
        choices=(False, True, "fp16", "bf16"),
    )
    compression: str = setting(
        "none",
        "in which form gradients cross between hosts",
        choices=("none", "fp16", "bf16", "int8", "topk"),
    )
    compression_configs: Nested[CompressionConfigs, CompressionConfigsDict] = nested(
        CompressionConfigs, "how much int8 and topk send, and of what"
    )
    dgc: bool = setting(False, "deep gradient compression")
    dgc_configs: Nested[DGCConfigs, DGCConfigsDict] = nested(
        DGCConfigs, "the sparsity schedule of DGC"
    )
    amp: bool = setting(False, "autocast around the model's forward")
    amp_configs: Nested[AmpConfigs, AmpConfigsDict] = nested(
        AmpConfigs, "what autocast computes in"
    )
    recompute: bool = setting(False, "compute activations again in backward")
    recompute_configs: Nested[RecomputeConfigs, RecomputeConfigsDict] = nested(
        RecomputeConfigs, "which modules recompute"
    )
    sync_batch_norm: bool = setting(False, "batch norm over the batches of all workers")
    broadcast_buffers: bool = setting(True, "the workers take worker 0's buffers")
    find_unused_parameters: bool = setting(False, "look for parameters that a forward did not use")
    gradient_scale: str = setting(
        "mean", "what happens to the workers' gradients", choices=("mean", "sum")
    )
    fetch_frequency: int = setting(1, "fetch values every n steps", minimum=1)
    execution_strategy: Nested[ExecutionStrategy, ExecutionStrategyDict] = nested(
        ExecutionStrategy, "how programs run"
    )
    durability: str = setting(
        "none",
        "what a parameter server keeps across its death",
        choices=("none", "snapshot", "log"),
    )
    durability_configs: Nested[DurabilityConfigs, DurabilityConfigsDict] = nested(
        DurabilityConfigs, "where and how it is kept"
    )
    lost_worker: str = setting(
        "fail",
        "what a job with servers does without a worker other than 0",
        choices=("fail", "go_on"),
    )
    checkpoint: str = setting("", "folder that the job saves into by itself; '': it does not")
    checkpoint_configs: Nested[CheckpointConfigs, CheckpointConfigsDict] = nested(
        CheckpointConfigs, "when it saves, and whether it goes on from there"
    )
    ssl: str | None = setting(
        None, "folder of certificates for every port", kind=str, optional=True
    )
    ssl_configs: Nested[SslConfigs, SslConfigsDict] = nested(
        SslConfigs, "suites of TLS, and when an end is warned about"
    )
    seed: int = setting(0, "seed of tables and of the order of records", minimum=0)
    worker_seeds: str = setting(
        "distinct",
        "whether the workers draw different random numbers in training, as for dropout",
        choices=("distinct", "same"),
    )
    deadline_s: float = setting(
        300.0, "how long anything may wait for a peer", above=0, maximum=1e7
    )

    if TYPE_CHECKING:  # the keys of ALIASES
        use_local_sgd: bool = False
        local_sgd_steps: int = 1
        local_sgd_is_warm_steps: int = 1
        exec_strategy: Nested[ExecutionStrategy, ExecutionStrategyDict] = nested(
            ExecutionStrategy, "how programs run"
        )
    else:  # mypy shall know the fields as keywords, and no others

        def __init__(self, /, **settings: Any) -> None:
            super().__init__()
            #: {setting: variable} of the defaults that came from the environment
            object.__setattr__(self, "_flags", _read_flags(self))
            for name, value in settings.items():
                setattr(self, name, value)

    def explain(self, job: JobFacts | None = None) -> str:
        """Which settings take effect in this job, and why another does not."""
        return effects.explain(self, job or current_job(), self.__dict__["_flags"])

    def inert(self, job: JobFacts | None = None) -> list[str]:
        """One sentence for each setting that somebody made and that has no effect here."""
        return effects.inert(self, job or current_job())

    def check(self, job: JobFacts | None = None) -> None:
        """Refuse what this job cannot do and must not pretend to do."""
        conflicts.check(self)
        job = job or current_job()
        conflicts.check_away(self, self.deadline_s if job.deadline_s is None else job.deadline_s)
        effects.check(self, job)

    def to_file(self, path: str | Path) -> None:
        """Write all settings that differ from their defaults, as TOML."""
        Path(path).write_text(toml.dumps(self), encoding="utf-8")

    @classmethod
    def from_file(cls, path: str | Path) -> DistributedStrategy:
        """Read what `to_file` wrote, or what a person wrote by hand."""
        try:
            return cls(**toml.load(Path(path)))
        except (StrategyError, NotAvailableError) as error:
            raise type(error)(f"{path}: {error}") from None


def _read_flags(strategy: DistributedStrategy) -> dict[str, str]:
    """Apply the variables of FLAGS as defaults; returns {setting: variable}."""
    used: dict[str, str] = {}
    for variable, name in FLAGS.items():
        text = os.environ.get(variable, "").strip()
        if not text:
            continue
        config, _, field = name.rpartition(".")
        owner: Settings = getattr(strategy, config) if config else strategy
        try:
            value = _parse_flag(text, rules_of(owner, field).kind)
            if not isinstance(value, str) and value < 0:
                continue  # Fleet's way of leaving the choice to the framework
            setattr(owner, field, value)
        except (ValueError, StrategyError) as error:
            raise StrategyError(f"{variable}={text!r} in the environment: {error}") from None
        owner._said.discard(field)
        used[name] = variable
    return used


def _parse_flag(text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in ("0", "1", "true", "false"):
            raise ValueError("expected 0 or 1")
        return text.lower() in ("1", "true")
    return kind(text)
