# SPDX-License-Identifier: Apache-2.0
"""Which modules go their own way in training, so that nobody can say what an evaluation does.

`F.dropout(x, p, self.training)` is known: the function that is called next acts by what was read.
After `if self.training:` anything may come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fleetlight.static.writing.recorder import Recorder

#: modules of these act by functions that are known
_KNOWN = "torch.nn.modules."


class _Training:
    """Stands for `training` of all modules while one is called by a program."""

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
    """Inside the block, whoever looks at `self.training` is noted."""
    if "training" in nn.Module.__dict__:
        # a program is written inside of another one
        yield
        return
    nn.Module.training = _Training(recorder.looks_at_training)  # type: ignore[assignment]
    try:
        yield
        recorder.note_look()
    finally:
        del nn.Module.training
