# SPDX-License-Identifier: Apache-2.0
"""The typed, validated settings of a job.

`strategy` is `DistributedStrategy`: a dataclass whose every assignment is checked (`settings.py`)
against rules kept with the field. `features/` has one file per feature: its nested config, and a
`Feature` (`feature.py`) with the fields, the effect of each field in a job, the conflicts with
other settings, and the checks of a job. `DistributedStrategy` has all features as bases, so that
type checkers know every field. `effects.py` collects the effects: `explain()` prints them, and
`distributed_optimizer` warns of settings that have none. A field that this version does not
implement is an error when set; `unsupported.py` says what to use in place of a setting of Fleet
or MindSpore. `config_dicts.py`, the nested configs as dicts for type checkers, is written from
the fields.
"""

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
