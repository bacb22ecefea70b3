# SPDX-License-Identifier: Apache-2.0
"""The names of `fleetlight.checkpoint` that only exported models need."""

from fleetlight.checkpoint.inference.exported import save_inference
from fleetlight.checkpoint.inference.loaded import InferenceModel, load_inference
from fleetlight.checkpoint.inference.lookups import TakenRows
from fleetlight.checkpoint.inference.served import RowReader

__all__ = [
    "InferenceModel",
    "RowReader",
    "TakenRows",
    "load_inference",
    "save_inference",
]
