# SPDX-License-Identifier: Apache-2.0
"""The state of a program: tensors that it reads and changes where they are.

They are the live module's and the live optimizer's own, so both stay true whoever trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

#: `weight` is what the gradients of a batch weigh, `schedule` what a schedule remembers, `constant`
#: what else a program reads; `pulled` is asked of parameter servers for each run
Kind = Literal[
    "parameter",
    "buffer",
    "optimizer",
    "gradient",
    "rate",
    "weight",
    "schedule",
    "constant",
    "pulled",
]
KINDS: tuple[Kind, ...] = (
    "parameter",
    "buffer",
    "optimizer",
    "gradient",
    "rate",
    "weight",
    "schedule",
    "constant",
    "pulled",
)


@dataclasses.dataclass(eq=False)
class Slot:
    """One tensor of the state."""

    kind: Kind
    #: as in the module's state_dict; `weight.exp_avg` for the state an optimizer keeps for it
    name: str
    tensor: Tensor
    #: what is in its place now: somebody else may have put another tensor there, or, of a learning
    #: rate, another number
    current: Callable[[], Tensor | float] | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    def refresh(self) -> None:
        """Take up what was set outside of the program."""
        if self.current is not None:
            now = self.current()
            if isinstance(now, Tensor):
                self.tensor = now
            else:
                self.tensor.fill_(now)


def rate(name: str, current: Callable[[], float]) -> Slot:
    """The slot of a learning rate."""
    return Slot("rate", name, torch.tensor(current(), dtype=torch.float64), current)
