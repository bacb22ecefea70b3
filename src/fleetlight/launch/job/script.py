# SPDX-License-Identifier: Apache-2.0
"""Check that the script exists, before a process starts and without importing it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

from fleetlight.errors import ConfigError
from fleetlight.launch.job.options import LaunchOptions


def check_script(options: LaunchOptions) -> None:
    """Raise ConfigError if the script is missing, in place of a traceback from each worker."""
    if options.module:
        _check_module(options.script)
    elif not os.path.isfile(options.script):
        what = "is a folder" if os.path.isdir(options.script) else "does not exist"
        raise ConfigError(
            f"script {options.script!r} {what} (looked in {os.getcwd()}); pass the path of a "
            "Python file, or -m MODULE"
        )


def _check_module(name: str) -> None:
    found = _find(name)
    if not found:
        remedy = (
            "-m takes the name of a module; omit -m to run a file"
            if name.endswith(".py")
            else "check its spelling and PYTHONPATH"
        )
        raise ConfigError(
            f"module {name!r} does not exist (looked in {os.getcwd()} and on Python's path); "
            f"{remedy}"
        )
    is_package = all(spec.submodule_search_locations is not None for spec in found)
    if is_package and not _find(f"{name}.__main__"):
        raise ConfigError(f"module {name!r} is a package without __main__.py; name a module in it")


def _find(name: str) -> list[ModuleSpec]:
    """All modules that `name` may mean.

    `importlib.util.find_spec` would import the parent packages, which are user code. Without
    them the search path of a package is not exact: a module in any of its folders counts.
    """
    above, _, last = name.rpartition(".")
    if not last:
        return []
    if not above:
        # workers search the current folder first, fleetrun itself may not
        return _specs(name, [os.getcwd(), *sys.path], None)
    places = [place for spec in _find(above) for place in spec.submodule_search_locations or ()]
    return _specs(name, places, places) if places else []


def _specs(name: str, places: Sequence[str], path: Sequence[str] | None) -> list[ModuleSpec]:
    in_places = [PathFinder.find_spec(name, [place]) for place in places]
    # editable installs have finders of their own
    elsewhere = [finder.find_spec(name, path) for finder in sys.meta_path]
    return [spec for spec in (*in_places, *elsewhere) if spec is not None]
