# SPDX-License-Identifier: Apache-2.0
"""The typed, validated settings of a job."""

from fleetlight.strategy.features.a_sync import ASyncConfigs
from fleetlight.strategy.features.amp import AmpConfigs
from fleetlight.strategy.features.checkpoint import CheckpointConfigs
from fleetlight.strategy.features.durability import DurabilityConfigs
from fleetlight.strategy.features.gradient_merge import GradientMergeConfigs
from fleetlight.strategy.features.local_training import (
    LOCAL_TRAINING,
    AdaptiveLocalSGDConfigs,
    AveragingConfigs,
    DiLoCoConfigs,
    LocalSGDConfigs,
)
from fleetlight.strategy.features.programs import ExecutionStrategy
from fleetlight.strategy.features.recompute import RecomputeConfigs
from fleetlight.strategy.features.reduction.compression import CompressionConfigs
from fleetlight.strategy.features.reduction.dgc import DGCConfigs
from fleetlight.strategy.features.ssl import SslConfigs
from fleetlight.strategy.job import JobFacts, current_job, set_current_job
from fleetlight.strategy.settings import differences
from fleetlight.strategy.strategy import DistributedStrategy

__all__ = [
    "LOCAL_TRAINING",
    "ASyncConfigs",
    "AdaptiveLocalSGDConfigs",
    "AmpConfigs",
    "AveragingConfigs",
    "CheckpointConfigs",
    "CompressionConfigs",
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
