# SPDX-License-Identifier: Apache-2.0
"""What can be done to a program before it runs: pure functions from form to form, one a file."""

from fleetlight.static.passes.amp import Amp
from fleetlight.static.passes.compress import Compress
from fleetlight.static.passes.fuse_all_reduce import FuseAllReduce
from fleetlight.static.passes.gradient_merge import GradientMerge
from fleetlight.static.passes.insert_all_reduce import InsertAllReduce
from fleetlight.static.passes.narrow import Hierarchical, Narrow
from fleetlight.static.passes.overlap import Overlap
from fleetlight.static.passes.recompute import Recompute
from fleetlight.static.passes.split_ps import SplitPS
from fleetlight.static.passes.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Amp",
    "Compress",
    "FuseAllReduce",
    "GradientMerge",
    "Hierarchical",
    "InsertAllReduce",
    "Narrow",
    "Overlap",
    "Recompute",
    "SplitPS",
    "SyncBatchNorm",
]
