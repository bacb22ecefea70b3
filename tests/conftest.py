# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: settings that make processes cheaper."""

from __future__ import annotations

import collections
import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.store.fixtures"]

CHILDREN = str(Path(__file__).with_name("children"))

# a slow machine fails no test; `make quick` tries fewer examples, unless a test sets its own number
settings.register_profile("usual", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", settings.get_profile("usual"), max_examples=15)
settings.load_profile("usual")


def pytest_configure() -> None:
    """Let processes of tests find `children/sitecustomize.py`."""
    path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if CHILDREN not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join([CHILDREN, *path])
    # without bytecode on disk, hundreds of processes would compile the package,
    # and pytest's rewriting of asserts would take half of each collection
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a `sampled(n)` test after the first n as long."""
    seen: collections.Counter[str] = collections.Counter()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None:
            function = item.nodeid.partition("[")[0]
            seen[function] += 1
            if seen[function] > marker.args[0]:
                item.add_marker(pytest.mark.long)


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection.

    Graphs of operations are many small objects that are soon freed without a collection.
    """
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
