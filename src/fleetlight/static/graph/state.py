# SPDX-License-Identifier: Apache-2.0
"""The state of a program: tensors that it reads and changes in place.

They are the live module's and the live optimizer's own, so eager steps and programs share them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fleetlight.errors import PlanError

#: `weight` is the weight of a batch's gradients, `schedule` a counter of a schedule, `constant`
#: any other tensor that a program reads; `pulled` comes from parameter servers in each run
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
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclasses.dataclass(eq=False)
class Slot:
    """One tensor of the state."""

    kind: Kind
    #: as in the module's state_dict; `weight.exp_avg` for an optimizer's state of `weight`
    name: str
    tensor: Tensor
    #: returns the present tensor or learning rate, which the script may have replaced
    current: Callable[[], Tensor | float] | None = None
    #: the dicts of live modules that contain it, with its names there
    places: list[tuple[dict[str, Any], str]] = dataclasses.field(default_factory=list)
    #: refuses to train if the optimizer changed after the program was written
    check: Callable[[], None] | None = None
    #: the original tensor of a replaced buffer, kept alive: the recorder knows tensors by identity
    _first: Tensor | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    def refresh(self) -> None:
        """Load what was set outside the program."""
        for place, name in self.places:
            if place.get(name) is not self.tensor:
                self._adopt_buffer()
                break
        if self.current is not None:
            now = self.current()
            if isinstance(now, Tensor):
                self.tensor = now
            else:
                self.tensor.fill_(now)

    def add_place(self, place: dict[str, Any], name: str) -> None:
        """Note that a module has it in this dict."""
        if not any(known is place and name == other for known, other in self.places):
            self.places.append((place, name))

    def _adopt_buffer(self) -> None:
        """Use the buffer that replaced this one; an error for a parameter."""
        now: list[Any] = [place.get(name) for place, name in self.places]
        one = now[0]
        if self.kind != "buffer" or any(o is not one for o in now) or not _alike(one, self.tensor):
            raise PlanError(
                f"{self}: its module has {_described(now, self.tensor)} instead since the program "
                "was written (load_state_dict(assign=True) or setting the attribute does that); "
                "copy values into the old tensor, or capture or write the program again"
            )
        self._first = self.tensor if self._first is None else self._first
        self.tensor = one


def rate(name: str, current: Callable[[], float]) -> Slot:
    """The slot of a learning rate."""
    return Slot("rate", name, torch.tensor(current(), dtype=torch.float64), current)


def _alike(one: Any, other: Tensor) -> bool:
    """Whether code for one tensor is valid for another."""
    return (
        isinstance(one, Tensor)
        and all(
            getattr(one, what) == getattr(other, what)
            for what in ("shape", "dtype", "device", "layout", "requires_grad")
        )
        and one.stride() == other.stride()
    )


def _described(now: list[Any], was: Tensor) -> str:
    """The tensor that replaced `was`, in words."""
    other = next(one for one in now if one is not was)
    if not isinstance(other, Tensor):
        return "nothing"
    return f"another tensor (of shape {list(other.shape)}, {other.dtype}, on {other.device})"
