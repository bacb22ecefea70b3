# SPDX-License-Identifier: Apache-2.0
"""What all tests share: processes that cost less."""

from __future__ import annotations

import gc
import os
from pathlib import Path

CHILDREN = str(Path(__file__).with_name("children"))


def pytest_configure() -> None:
    """Processes that tests start find `children/sitecustomize.py`."""
    path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if CHILDREN not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join([CHILDREN, *path])
    # or each of hundreds compiles the package anew
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_finish() -> None:
    """What is imported by now stays, and is not looked at again and again for garbage.

    Graphs of operations are many small objects that soon go again by themselves.
    """
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
