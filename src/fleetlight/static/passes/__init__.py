# SPDX-License-Identifier: Apache-2.0
"""Passes: pure functions from form to form that rewrite a program before it runs.

Each file declares a `PassRecord`, which the package finds.
"""

import importlib
import pkgutil

from fleetlight.static.graph.form import Pass
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
from fleetlight.static.rewriting.registry import PassRecord, PassRequest, in_order

__all__ = [
    "Amp",
    "Compress",
    "FuseAllReduce",
    "GradientMerge",
    "Hierarchical",
    "InsertAllReduce",
    "Narrow",
    "Overlap",
    "PassRequest",
    "Recompute",
    "SplitPS",
    "SyncBatchNorm",
    "chosen",
]


def records() -> tuple[PassRecord, ...]:
    """The records of all passes, in the order in which they run."""
    names = [f"{__name__}.{found.name}" for found in pkgutil.iter_modules(__path__)]
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    return in_order(value for value in values if isinstance(value, PassRecord))


def chosen(request: PassRequest) -> tuple[Pass, ...]:
    """The passes for a program of a job."""
    made = [record.wanted(request) for record in records()]
    return tuple(one for one in made if one is not None)
