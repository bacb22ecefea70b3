# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: pure functions from the state of a job to files and back.

This package does not depend on processes. The caller has gathered the state already, and decides
which process writes. The names are in `api.py`, and the first use of one imports torch; commands
that look after checkpoints use `storage` only. Those of exported models load at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetlight.checkpoint.api import *  # noqa: F403
    from fleetlight.checkpoint.inference.exported import save_inference as save_inference
    from fleetlight.checkpoint.inference.loaded import InferenceModel as InferenceModel
    from fleetlight.checkpoint.inference.loaded import load_inference as load_inference
    from fleetlight.checkpoint.inference.lookups import TakenRows as TakenRows
    from fleetlight.checkpoint.inference.served import RowReader as RowReader

else:
    #: names of exported models, and their modules
    _OF_INFERENCE = {
        "InferenceModel": "inference.loaded",
        "RowReader": "inference.served",
        "TakenRows": "inference.lookups",
        "load_inference": "inference.loaded",
        "save_inference": "inference.exported",
    }

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # `from fleetlight.checkpoint import api` would ask this function for it
        part = importlib.import_module(f"{__name__}.{_OF_INFERENCE.get(name, 'api')}")
        if name not in _OF_INFERENCE and name not in part.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(part, name)
        return value
