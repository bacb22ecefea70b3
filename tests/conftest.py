# SPDX-License-Identifier: Apache-2.0
"""What all tests share: processes that cost less."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from hypothesis import settings

CHILDREN = str(Path(__file__).with_name("children"))

# `make quick` tries fewer examples; a test that says its own number keeps it
settings.register_profile("quick", max_examples=15)


def pytest_configure() -> None:
    """Processes that tests start find `children/sitecustomize.py`."""
    path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if CHILDREN not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join([CHILDREN, *path])
    # without bytecode on disk, hundreds of processes compile the package,
    # and half of each collection is pytest's rewriting of asserts
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """What is imported by now stays, and is not looked at again and again for garbage.

    Graphs of operations are many small objects that soon go again by themselves.
    """
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
