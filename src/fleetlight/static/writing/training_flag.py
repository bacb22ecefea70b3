# SPDX-License-Identifier: Apache-2.0
"""Detects modules that branch on `training`, whose evaluation a program cannot know.

`F.dropout(x, p, self.training)` is known: the next call shows how the flag is used.
After `if self.training:` any code may follow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fleetlight.static.writing.recorder import Recorder

#: these modules pass the flag to known functions
_KNOWN = "torch.nn.modules."


class _Training:
    """Replaces `training` of all modules while a program calls one."""

    def __init__(self, read: Callable[[], None]) -> None:
        self._read = read

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        value = module.__dict__.get("training", True)
        if value and not type(module).__module__.startswith(_KNOWN):
            self._read()
        return value

    def __set__(self, module: nn.Module, value: bool) -> None:
        module.__dict__["training"] = value


@contextlib.contextmanager
def watched_training(recorder: Recorder) -> Iterator[None]:
    """Inside the block, reads of `self.training` are noted.

    Only for the call of a module that a program records: torch has no hook for reads of the flag.
    """
    if "training" in nn.Module.__dict__:
        # a program is written while another one is
        yield
        return
    nn.Module.training = _Training(recorder.flag_read)  # type: ignore[assignment]
    try:
        yield
        recorder.mark_flag_read()
    finally:
        del nn.Module.training
