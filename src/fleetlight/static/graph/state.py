# SPDX-License-Identifier: Apache-2.0
"""The state of a program: tensors that it reads and changes where they are.

They are the live module's and the live optimizer's own, so both stay true whoever trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fleetlight.errors import PlanError

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
KINDS: tuple[Kind, ...] = get_args(Kind)


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
    #: where live modules have it: their own dicts, and its names there
    places: list[tuple[dict[str, Any], str]] = dataclasses.field(default_factory=list)
    #: refuses to train what is not as it was when the program was written
    check: Callable[[], None] | None = None
    #: what it was written with, after it was followed: programs know tensors by their identity
    _first: Tensor | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    def refresh(self) -> None:
        """Take up what was set outside of the program."""
        for place, name in self.places:
            if place.get(name) is not self.tensor:
                self._follow()
                break
        if self.current is not None:
            now = self.current()
            if isinstance(now, Tensor):
                self.tensor = now
            else:
                self.tensor.fill_(now)

    def is_in(self, place: dict[str, Any], name: str) -> None:
        """A module has it there."""
        if not any(known is place and name == other for known, other in self.places):
            self.places.append((place, name))

    def _follow(self) -> None:
        """Take the buffer that was put in place of this one; of a parameter, optimizers know."""
        now: list[Any] = [place.get(name) for place, name in self.places]
        one = now[0]
        if self.kind != "buffer" or any(o is not one for o in now) or not _alike(one, self.tensor):
            raise PlanError(
                f"{self}: its module has {_words(now, self.tensor)} in its place since the program "
                "was written (load_state_dict(assign=True) does that, and setting the attribute); "
                "copy values into the tensor that is there, or capture or write the program again"
            )
        self._first = self.tensor if self._first is None else self._first
        self.tensor = one


def rate(name: str, current: Callable[[], float]) -> Slot:
    """The slot of a learning rate."""
    return Slot("rate", name, torch.tensor(current(), dtype=torch.float64), current)


def _alike(one: Any, other: Tensor) -> bool:
    """Whether code that was made for one tensor is right for another."""
    return (
        isinstance(one, Tensor)
        and all(
            getattr(one, what) == getattr(other, what)
            for what in ("shape", "dtype", "device", "layout", "requires_grad")
        )
        and one.stride() == other.stride()
    )


def _words(now: list[Any], was: Tensor) -> str:
    """What is there now."""
    other = next(one for one in now if one is not was)
    if not isinstance(other, Tensor):
        return "nothing"
    return f"another tensor (of shape {list(other.shape)}, {other.dtype}, on {other.device})"
