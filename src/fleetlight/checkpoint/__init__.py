# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: pure functions from the state of a job to files and back.

This package knows nothing of processes. Who calls it has gathered the state already, and decides
which process writes.
"""

from fleetlight.checkpoint.differences import refuse_differences
from fleetlight.checkpoint.files import Sink
from fleetlight.checkpoint.inference import InferenceModel, load_inference, save_inference
from fleetlight.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    HighWaterEntry,
    Manifest,
    TableEntry,
    TableFileEntry,
)
from fleetlight.checkpoint.model import (
    ModelState,
    fitted_model_state,
    is_extra,
    load_model_state,
    model_state,
)
from fleetlight.checkpoint.optimizer import (
    OptimizerState,
    class_name,
    fitted_optimizer_state,
    load_optimizer_state,
    optimizer_state,
)
from fleetlight.checkpoint.reader import Checkpoint, export, read
from fleetlight.checkpoint.renaming import Renamed
from fleetlight.checkpoint.rng import RngState, rng_state, set_rng_state
from fleetlight.checkpoint.snapshot import SavedTables, Snapshot, write
from fleetlight.checkpoint.tables import tables_in
from fleetlight.checkpoint.values import pack, unpack
from fleetlight.checkpoint.worker import WorkerState

__all__ = [
    "MANIFEST",
    "Checkpoint",
    "FileEntry",
    "HighWaterEntry",
    "InferenceModel",
    "Manifest",
    "ModelState",
    "OptimizerState",
    "Renamed",
    "RngState",
    "SavedTables",
    "Sink",
    "Snapshot",
    "TableEntry",
    "TableFileEntry",
    "WorkerState",
    "class_name",
    "export",
    "fitted_model_state",
    "fitted_optimizer_state",
    "is_extra",
    "load_inference",
    "load_model_state",
    "load_optimizer_state",
    "model_state",
    "optimizer_state",
    "pack",
    "read",
    "refuse_differences",
    "rng_state",
    "save_inference",
    "set_rng_state",
    "tables_in",
    "unpack",
    "write",
]
