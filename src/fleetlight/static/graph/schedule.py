# SPDX-License-Identifier: Apache-2.0
"""`Schedule`: which parts of a program run, if not all of them in each run.

A pass that needs one puts slots of the kind `gradient` between backward and the optimizer's step,
so that the step depends on the state only. The schedule's own counters are state as well, in
slots of the kind `schedule`, so a checkpoint has them.
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

#: names of slots: backwards since the last step, loss scale, steps since it changed
MERGED, SCALE, GROWTH = "merged backwards", "loss scale", "steps of this loss scale"
#: the factors of torch.amp.GradScaler
_GROWS, _SHRINKS = 2.0, 0.5


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How many runs make a step, and whether the loss is scaled."""

    #: number of backwards in one step
    merges: int = 1
    #: steps without overflow before the loss scale grows; None without a loss scale
    growth_interval: int | None = None

    @property
    def is_plain(self) -> bool:
        """True if each run is a step, whatever the gradients are."""
        return self.merges == 1 and self.growth_interval is None

    @property
    def scales(self) -> bool:
        """True if the loss is scaled and steps with an overflow are skipped."""
        return self.growth_interval is not None

    @property
    def reduces_apart(self) -> bool:
        """True if merged gradients are reduced in their own part, before the overflow check."""
        return self.merges > 1 and self.scales

    def slots(self) -> list[Slot]:
        """The initial counters; the pass adds the loss scale."""
        return (
            []
            if self.merges == 1
            else [Slot("schedule", MERGED, torch.zeros((), dtype=torch.int64))]
        )

    def count_backward(self, state: Iterable[Slot]) -> bool:
        """Count a backward; true if it is the last one before a step."""
        if self.merges == 1:
            return True
        count = _remembered(state)[MERGED]
        count.add_(1)
        return int(count) >= self.merges

    def restart(self, state: Iterable[Slot]) -> None:
        """Clear the merged gradients."""
        if self.merges == 1:
            return
        _remembered(state)[MERGED].zero_()
        for alike in _alike(gradients_in(state)):
            foreach_zero_(alike)

    def unscale(self, state: Iterable[Slot]) -> bool:
        """Unscale the gradients; false after an overflow.

        The loss scale is updated as by torch.amp.GradScaler.
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
    """The slots of the loss scale and of its steps without overflow."""
    return [
        Slot("schedule", SCALE, torch.full((), first, device=device)),
        Slot("schedule", GROWTH, torch.zeros((), dtype=torch.int32, device=device)),
    ]


def scaler_state(state: Iterable[Slot]) -> dict[str, Any] | None:
    """The loss scale in the format of torch.amp.GradScaler, or None without one."""
    slots = _remembered(state)
    if SCALE not in slots:
        return None
    return {"scale": slots[SCALE].item(), GROWTH_TRACKER: int(slots[GROWTH])}


def load_scaler_state(state: Iterable[Slot], saved: dict[str, Any] | None) -> None:
    """Load the loss scale of a program or a GradScaler."""
    slots = _remembered(state)
    if saved and SCALE in slots:
        slots[SCALE].fill_(saved["scale"])
        slots[GROWTH].fill_(saved[GROWTH_TRACKER])


def gradients_in(state: Iterable[Slot]) -> list[Tensor]:
    """The gradients that the state keeps between runs."""
    return [slot.tensor for slot in state if slot.kind == "gradient"]


def _remembered(state: Iterable[Slot]) -> dict[str, Tensor]:
    return {slot.name: slot.tensor for slot in state if slot.kind == "schedule"}


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors grouped by dtype and device, for foreach kernels."""
    groups = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype, tensor.device].append(tensor)
    return list(groups.values())
