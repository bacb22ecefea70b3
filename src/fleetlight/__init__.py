# SPDX-License-Identifier: Apache-2.0
"""Distributed training for PyTorch: `import fleetlight as fleet`.

The public names are in `fleetlight.fleet.api`. The first use of one imports them all, so the
launcher, which uses none, does not wait for torch. Each package is imported at its first use.
"""

from __future__ import annotations

import gc
import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fleetlight.version import VERSION

if TYPE_CHECKING:
    from fleetlight import data as data
    from fleetlight import optim as optim
    from fleetlight import static as static
    from fleetlight.fleet.api import *  # noqa: F403
    from fleetlight.fleet.public import metrics as metrics
    from fleetlight.fleet.public import nn as nn
    from fleetlight.fleet.public import util as util
    from fleetlight.static import Program

    #: the program of the last `minimize`
    main_program: Program

__version__ = VERSION

#: public names that are packages, and where they are
_PACKAGES = {
    "data": "data",
    "metrics": "fleet.public.metrics",
    "nn": "fleet.public.nn",
    "optim": "optim",
    "static": "static",
    "util": "fleet.public.util",
}


if not TYPE_CHECKING:  # mypy must see the names above only

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return _public()
        if name.startswith("__"):
            raise AttributeError(f"module 'fleetlight' has no attribute {name!r}")
        api = _api()
        if name in _PACKAGES:
            package = globals()[name] = importlib.import_module(f"fleetlight.{_PACKAGES[name]}")
            return package
        if name == "main_program":
            # not cached: it changes with each `minimize`
            from fleetlight.fleet.training.programs import main_program

            return main_program()
        if name not in api.__all__:
            raise AttributeError(f"module 'fleetlight' has no attribute {name!r}; {_instead(name)}")
        value = globals()[name] = getattr(api, name)
        return value


def __dir__() -> list[str]:
    own = {name for name in globals() if name.startswith("__")}
    return sorted({*own, *_public(), "main_program"})


def _public() -> list[str]:
    """The names that `from fleetlight import *` and `pydoc fleetlight` show."""
    return sorted({*_api().__all__, *_PACKAGES})


def _api() -> ModuleType:
    """The module of the public names."""
    # loading leaves no garbage, and the collector would read all objects of torch to find that out
    was_on = gc.isenabled()
    gc.disable()
    try:
        from fleetlight.fleet import api
    finally:
        if was_on:
            gc.enable()
    return api


def _instead(name: str) -> str:
    from fleetlight.errors import did_you_mean
    from fleetlight.fleet.hints import hint

    return hint(name) or did_you_mean(name, _public(), elsewhere="dir(fleet) lists all")
