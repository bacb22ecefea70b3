# SPDX-License-Identifier: Apache-2.0
"""`Schedule`: which parts of a program are run when, if not all of them each time.

A pass that needs one puts slots of the kind `gradient` between backward and the optimizer's step,
so that the step depends on the state only. What the schedule itself remembers is state as well, in
slots of the kind `schedule`: whoever keeps the state of a program keeps its place in the schedule.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fleetlight.static.graph.state import Slot
from fleetlight.torch_compat.optimizers import (
    GROWTH_TRACKER,
    foreach_unscale_,
    foreach_update_scale_,
    foreach_zero_,
)

#: names of slots: backwards since the last step, factor of the loss, steps since it has changed
MERGED, SCALE, GROWTH = "merged backwards", "loss scale", "steps of this loss scale"
#: as torch.amp.GradScaler changes the factor
_GROWS, _SHRINKS = 2.0, 0.5


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a program's steps are made of."""

    #: how many backwards make one step
    merges: int = 1
    #: after how many good steps the factor of the loss grows; None where there is no factor
    growth_interval: int | None = None

    @property
    def is_plain(self) -> bool:
        """True where each run is a step, whatever the gradients are."""
        return self.merges == 1 and self.growth_interval is None

    @property
    def scales(self) -> bool:
        """True where the loss has a factor, and a step with infinities is left out."""
        return self.growth_interval is not None

    @property
    def reduces_apart(self) -> bool:
        """True where gradients of several backwards are reduced before they are looked at."""
        return self.merges > 1 and self.scales

    def slots(self) -> list[Slot]:
        """What it remembers, as it is in the beginning; the factor is the pass's own."""
        return (
            []
            if self.merges == 1
            else [Slot("schedule", MERGED, torch.zeros((), dtype=torch.int64))]
        )

    def counted(self, state: Iterable[Slot]) -> bool:
        """Count a backward; true when it was the last one before a step."""
        if self.merges == 1:
            return True
        count = _remembered(state)[MERGED]
        count.add_(1)
        return int(count) >= self.merges

    def restart(self, state: Iterable[Slot]) -> None:
        """Nothing has been merged yet."""
        if self.merges == 1:
            return
        _remembered(state)[MERGED].zero_()
        for alike in _alike(gradients_in(state)):
            foreach_zero_(alike)

    def unscaled(self, state: Iterable[Slot]) -> bool:
        """Take the factor of the loss out of the gradients; false where that leaves no numbers.

        The factor is changed as torch.amp.GradScaler does.
        """
        if self.growth_interval is None:
            return True
        slots = _remembered(state)
        scale, growth = slots[SCALE], slots[GROWTH]
        found = torch.zeros_like(scale)
        inverse = scale.double().reciprocal().float()
        for alike in _alike(gradients_in(state)):
            foreach_unscale_(alike, found, inverse)
        foreach_update_scale_(scale, growth, found, _GROWS, _SHRINKS, self.growth_interval)
        return not found.item()


def scaling_slots(first: float, device: torch.device) -> list[Slot]:
    """The factor of the loss, and how many steps it has been good for."""
    return [
        Slot("schedule", SCALE, torch.full((), first, device=device)),
        Slot("schedule", GROWTH, torch.zeros((), dtype=torch.int32, device=device)),
    ]


def scaler_state(state: Iterable[Slot]) -> dict[str, Any] | None:
    """The factor of the loss in the words of torch.amp.GradScaler, or None without one."""
    slots = _remembered(state)
    if SCALE not in slots:
        return None
    return {"scale": slots[SCALE].item(), GROWTH_TRACKER: int(slots[GROWTH])}


def load_scaler_state(state: Iterable[Slot], saved: dict[str, Any] | None) -> None:
    """Take up the factor of the loss where a program or a GradScaler has left it."""
    slots = _remembered(state)
    if saved and SCALE in slots:
        slots[SCALE].fill_(saved["scale"])
        slots[GROWTH].fill_(saved[GROWTH_TRACKER])


def gradients_in(state: Iterable[Slot]) -> list[Tensor]:
    """Gradients that are kept between runs."""
    return [slot.tensor for slot in state if slot.kind == "gradient"]


def _remembered(state: Iterable[Slot]) -> dict[str, Tensor]:
    return {slot.name: slot.tensor for slot in state if slot.kind == "schedule"}


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """By what one operation can change at once."""
    groups = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype, tensor.device].append(tensor)
    return list(groups.values())
