# SPDX-License-Identifier: Apache-2.0
"""What to do: the typed, validated settings of a job."""

from fleetlight.strategy.configs import (
    AdaptiveLocalSGDConfigs,
    AmpConfigs,
    ASyncConfigs,
    CheckpointConfigs,
    DGCConfigs,
    DiLoCoConfigs,
    DurabilityConfigs,
    ExecutionStrategy,
    GradientMergeConfigs,
    LocalSGDConfigs,
    RecomputeConfigs,
    SslConfigs,
)
from fleetlight.strategy.job import JobFacts, current_job, set_current_job
from fleetlight.strategy.settings import differences
from fleetlight.strategy.strategy import DistributedStrategy

__all__ = [
    "ASyncConfigs",
    "AdaptiveLocalSGDConfigs",
    "AmpConfigs",
    "CheckpointConfigs",
    "DGCConfigs",
    "DiLoCoConfigs",
    "DistributedStrategy",
    "DurabilityConfigs",
    "ExecutionStrategy",
    "GradientMergeConfigs",
    "JobFacts",
    "LocalSGDConfigs",
    "RecomputeConfigs",
    "SslConfigs",
    "current_job",
    "differences",
    "set_current_job",
]
