# SPDX-License-Identifier: Apache-2.0
"""Passes: pure functions from form to form that rewrite a program before it runs.

Each file declares a `PassRecord`, which the package finds.

`passes/` has one pass a file; they share `rewriting/`. A pass is a pure function from form to
form that adds a line to its report. Its file declares a `PassRecord` (`rewriting/registry.py`):
when a job needs the pass, and its position. A pass for steps of several runs (gradient merge,
loss scale) puts slots between backward and update. It gives the form a `Schedule` of the parts
that run. A `Program` is a source and its passes.
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
