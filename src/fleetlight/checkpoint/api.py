# SPDX-License-Identifier: Apache-2.0
"""The names of `fleetlight.checkpoint`, but for those of exported models."""

from fleetlight.checkpoint.formats.tables import read_tables
from fleetlight.checkpoint.formats.values import pack, unpack
from fleetlight.checkpoint.reader import Checkpoint, export, read
from fleetlight.checkpoint.snapshot import JobSnapshot, SavedTables, write
from fleetlight.checkpoint.state.model import (
    ModelState,
    is_extra,
    load_model_state,
    model_state,
    prepare_model_load,
    refuse_differences,
)
from fleetlight.checkpoint.state.optimizer import (
    OptimizerState,
    class_name,
    load_optimizer_state,
    optimizer_state,
    prepare_optimizer_load,
)
from fleetlight.checkpoint.state.rng import RngState, rng_state, set_rng_state
from fleetlight.checkpoint.state.worker import WorkerState
from fleetlight.checkpoint.storage.bases import Bases, SavedBase
from fleetlight.checkpoint.storage.files import FileTarget, FolderTarget
from fleetlight.checkpoint.storage.manifest import (
    MANIFEST,
    FileEntry,
    HighWaterEntry,
    Manifest,
    TableEntry,
    TableFileEntry,
)
from fleetlight.checkpoint.storage.sources import exists, source_of

__all__ = [
    "MANIFEST",
    "Bases",
    "Checkpoint",
    "FileEntry",
    "FileTarget",
    "FolderTarget",
    "HighWaterEntry",
    "JobSnapshot",
    "Manifest",
    "ModelState",
    "OptimizerState",
    "RngState",
    "SavedBase",
    "SavedTables",
    "TableEntry",
    "TableFileEntry",
    "WorkerState",
    "class_name",
    "exists",
    "export",
    "is_extra",
    "load_model_state",
    "load_optimizer_state",
    "model_state",
    "optimizer_state",
    "pack",
    "prepare_model_load",
    "prepare_optimizer_load",
    "read",
    "read_tables",
    "refuse_differences",
    "rng_state",
    "set_rng_state",
    "source_of",
    "unpack",
    "write",
]
