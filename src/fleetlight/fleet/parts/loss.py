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
        #: the last loss, cut off from its graph
        self.value: Tensor | None = None
        #: how many have been seen
        self.number = 0
        self._end = listen_to_backwards(self.see)

    def see(self, loss: Any) -> None:
        """A backward begins here; what is not one number is no loss."""
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.value = loss.detach()
            self.number += 1

    def close(self) -> None:
        """See no more."""
        self._end()
        self.value = None


def scaler_at_work() -> torch.amp.GradScaler | None:
    """The scaler among the callers, if one of them is stepping an optimizer.

    Only to refuse one, in the words of an error: a scaler gives an optimizer no more than copies of
    what it has found, so there is no other way to notice one that is not attached.
    """
    stepping = torch.amp.GradScaler.step.__code__
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code is stepping:
            # a frame whose variables are read may keep them until it ends: no other's are
            found = frame.f_locals["self"]
            assert isinstance(found, torch.amp.GradScaler)
            return found
        frame = frame.f_back
    return None
