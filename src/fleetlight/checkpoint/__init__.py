# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: pure functions from the state of a job to files and back.

This package does not depend on processes. The caller has gathered the state already, and decides
which process writes. The names are in `api.py` and `inference/api.py`, and the first use of one
imports torch; commands that look after checkpoints use `storage` only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fleetlight.checkpoint.api import *  # noqa: F403
    from fleetlight.checkpoint.inference.api import *  # noqa: F403

else:

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        for part in ("api", "inference.api"):
            # `from fleetlight.checkpoint import api` would ask this function for it
            api = importlib.import_module(f"fleetlight.checkpoint.{part}")
            if name in api.__all__:
                value = globals()[name] = getattr(api, name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
