# SPDX-License-Identifier: Apache-2.0
"""The loss of the last backward, and the loss scaler that steps an optimizer."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class SeenLoss:
    """Stands in for `torch.Tensor.backward` until it is closed, and keeps what passes by."""

    def __init__(self) -> None:
        #: the last loss, cut off from its graph
        self.value: Tensor | None = None
        #: how many have been seen
        self.number = 0
        self._is_open = True
        self._backward: Callable[..., Any] = Tensor.backward
        self._stand_in = self._standing_in(self._backward)
        Tensor.backward = self._stand_in  # type: ignore[method-assign]

    def see(self, loss: Tensor) -> None:
        """A backward begins here; what is not one number is no loss."""
        if self._is_open and loss.numel() == 1:
            self.value = loss.detach()
            self.number += 1

    def close(self) -> None:
        """See no more. Somebody who stands in for the stand-in may go on calling it."""
        self._is_open = False
        self.value = None
        if torch.Tensor.backward is self._stand_in:
            Tensor.backward = self._backward  # type: ignore[method-assign]

    def _standing_in(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def stand_in(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.see(loss)
            return backward(loss, *args, **kwargs)

        return stand_in


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
