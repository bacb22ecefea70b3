# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: settings that make processes cheaper."""

from __future__ import annotations

import collections
import faulthandler
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.store.fixtures"]

_stderr = 2
CHILDREN = str(Path(__file__).with_name("children"))

# a slow machine fails no test; `make test` tries the same examples each time, `make quick` fewer of
# them, unless a test sets its own number
settings.register_profile("usual", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("test", settings.get_profile("usual"), derandomize=True)
settings.register_profile("quick", settings.get_profile("usual"), max_examples=15)
settings.load_profile("usual")


def pytest_configure() -> None:
    """Let processes of tests find `children/sitecustomize.py`."""
    global _stderr
    _stderr = os.dup(2)  # each test's output is captured
    path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if CHILDREN not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join([CHILDREN, *path])
    # without bytecode on disk, hundreds of processes would compile the package,
    # and pytest's rewriting of asserts would take half of each collection
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases after the first n as long: of a `sampled(n)` test, and of a slow one (n = 1).

    So the first case in a list of parameters is the one that tells most.
    """
    seen: collections.Counter[str] = collections.Counter()
    for item in items:
        number = _number_of_cases(item)
        if number is not None and item.get_closest_marker("long") is None:
            function = item.nodeid.partition("[")[0]
            seen[function] += 1
            if seen[function] > number:
                item.add_marker(pytest.mark.long)


def _number_of_cases(item: pytest.Item) -> int | None:
    """How many cases `make test` runs, if not all."""
    if (marker := item.get_closest_marker("sampled")) is not None:
        return int(marker.args[0])
    slow = item.get_closest_marker("multiprocess") or item.get_closest_marker("slow")
    return 1 if slow is not None else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: object) -> Iterator[None]:
    """End the process at twice the limit of a test, as a signal interrupts no wait in C++."""
    marker = item.get_closest_marker("timeout")
    given = [*marker.args, *marker.kwargs.values()] if marker else [item.config.getini("timeout")]
    limit = 0.0 if item.config.getoption("usepdb") else float(given[0])
    if not limit or item.config.getoption("timeout") == 0:
        return (yield)
    faulthandler.dump_traceback_later(2 * limit, exit=True, file=_stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _no_fsync(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skip fsync, but in `durable` tests: no test pulls the plug."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("durable") is None:
            for name in ("fsync", "fdatasync"):
                patch.setattr(os, name, lambda fd: None)
        yield


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection.

    Graphs of operations are many small objects that are soon freed without a collection.
    """
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
