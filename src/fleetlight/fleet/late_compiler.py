# SPDX-License-Identifier: Apache-2.0
"""Keeps torch's compiler out of a server until somebody compiles something.

An optimizer loads torch._dynamo, 80 MiB, only to tell it that here is nothing to compile. Until
somebody wants more of the module, a stand-in hears that as well.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"


class _StandIn(ModuleType):
    """Knows what eager code says to the compiler; becomes the module when asked for more."""

    def __getattr__(self, name: str) -> Any:
        # who only looks through all modules asks for names like __file__
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r} before it is loaded")
        # another thread may have been first
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)

    @staticmethod
    def graph_break(*_: object, **__: object) -> None:
        """There is no graph."""

    @staticmethod
    def disable(fn: Any = None, *_: object, **__: object) -> Any:
        """What is not compiled is as it is; without a function it is a decorator."""
        return _StandIn.disable if fn is None else fn


def postpone_compiler() -> None:
    """Let torch._dynamo be loaded when it is needed; nothing changes if it already is."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _StandIn(_NAME)
