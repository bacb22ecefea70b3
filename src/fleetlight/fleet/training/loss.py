# SPDX-License-Identifier: Apache-2.0
"""`SeenLoss`: the loss on which backward was called last, for schedules that follow it."""

from __future__ import annotations

import functools
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
