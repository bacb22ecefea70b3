# SPDX-License-Identifier: Apache-2.0
"""The loss of the last backward, and the loss scaler that steps an optimizer."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from fleetlight.torch_compat.used_graphs import listen_to_backwards


class LossProbe:
    """Keeps the loss of the last backward until it is closed."""

    def __init__(self) -> None:
        #: the last loss, detached
        self.value: Tensor | None = None
        #: the number of losses seen
        self.number = 0
        self._end = listen_to_backwards(self.see)

    def see(self, loss: Any) -> None:
        """Note the tensor on which backward is called, if it is one number."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.value = loss.detach()
            self.number += 1

    def close(self) -> None:
        """Stop watching backwards."""
        self._end()
        self.value = None


def scaler_at_work() -> torch.amp.GradScaler | None:
    """The GradScaler whose `step` is on the call stack, if there is one.

    It serves error messages only. A scaler passes no reference of itself to the optimizer, so the
    stack is the only sign of a scaler that is not attached.
    """
    stepping = torch.amp.GradScaler.step.__code__
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code is stepping:
            # reading the locals of a frame may keep them alive: read those of no other frame
            found = frame.f_locals["self"]
            assert isinstance(found, torch.amp.GradScaler)
            return found
        frame = frame.f_back
    return None
