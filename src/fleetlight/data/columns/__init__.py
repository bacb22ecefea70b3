# SPDX-License-Identifier: Apache-2.0
"""Columnar files as data sets: Parquet, Arrow and text, read group by group."""

from __future__ import annotations

import importlib
from typing import Any

from fleetlight.errors import ConfigError


def arrow(module: str = "pyarrow") -> Any:
    """pyarrow, which is an extra, or a module of it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            "columnar files need pyarrow, which is not installed; "
            "run: pip install 'fleetlight[data]'"
        ) from error
