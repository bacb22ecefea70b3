# SPDX-License-Identifier: Apache-2.0
"""torch's profiler beside one of the script: `torch.autograd.profiler`.

Why: torch records for one profiler at a time. A second one takes its place without an error, and
the end of the first crashes the process. No public name says that a profiler runs or begins. In a
torch without these names, `YieldingProfiler` refuses to start.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler

#: what each of torch's profilers calls, by these names, to begin
_BEGINS = ("_prepare_profiler", "_enable_profiler")


def is_profiled() -> bool:
    """True while a profiler of torch runs in this thread, or is warming up or runs in any."""
    is_enabled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: False)
    # only the objects themselves know that they are warming up
    return is_enabled() or any(
        one.entered and (one.kineto_results is None or getattr(one, "acc_events", False))
        for one in gc.get_objects()
        if issubclass(type(one), torch_profiler.profile)
    )


class YieldingProfiler:
    """torch's profiler, which never runs beside another one: it ends when another one begins."""

    def __init__(self) -> None:
        self._profiler: torch.profiler.profile | None = None
        self._thread = 0
        self._replaced: dict[str, tuple[Any, Any]] = {}

    def start(self) -> bool:
        """Begin; False where another one runs."""
        begins: dict[str, Any] = {name: getattr(torch_profiler, name, None) for name in _BEGINS}
        if None in begins.values():
            raise RuntimeError(f"torch {torch.__version__} lacks {' or '.join(_BEGINS)}")
        if is_profiled():
            return False
        profiler = torch.profiler.profile()
        profiler.start()
        self._profiler, self._thread = profiler, threading.get_ident()
        for name, begin in begins.items():
            self._replaced[name] = begin, self._yielding(begin)
            setattr(torch_profiler, name, self._replaced[name][1])
        return True

    def stop(self) -> torch.profiler.profile | None:
        """End; what was recorded, or None if another one has begun."""
        for name, (begin, own) in self._replaced.items():
            if getattr(torch_profiler, name) is own:
                setattr(torch_profiler, name, begin)
        self._replaced = {}
        profiler, self._profiler = self._profiler, None
        # torch crashes if another thread ends it: then it stays, and records nothing
        if profiler is None or threading.get_ident() != self._thread:
            return None
        profiler.stop()
        return profiler

    def _yielding(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def begin_alone(*args: Any, **options: Any) -> Any:
            with contextlib.suppress(Exception):
                self.stop()
            return begin(*args, **options)

        return begin_alone
