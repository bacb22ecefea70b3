# SPDX-License-Identifier: Apache-2.0
"""Eager training with the settings that passes implement in a program."""

import contextlib

import torch
from torch import Tensor, nn


class Eager:
    """Trains with gradient merge and autocast, as an optimizer of Fleet does."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        merges: int = 1,
        average: bool = True,
        dtype: torch.dtype | None = None,
        first_scale: float = 65536.0,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._merges, self._average, self._dtype = merges, average, dtype
        self._runs = 0
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=first_scale, enabled=dtype is torch.float16
        )

    def run(self, given: dict[str, Tensor]) -> Tensor:
        """Runs one backward, and a step if one is due; returns the loss."""
        with torch.autocast("cpu", self._dtype) if self._dtype else contextlib.nullcontext():
            output = self.model(given["x"])
        wide = output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
        loss = nn.functional.cross_entropy(wide, given["y"])
        self.scaler.scale(loss).backward()
        self._runs += 1
        if self._runs % self._merges == 0:
            self._step()
        return loss.detach()

    def _step(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None and self._average:
                parameter.grad /= self._merges
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
