# SPDX-License-Identifier: Apache-2.0
"""How sparse DGC is at a step. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fleetlight.errors import StrategyError


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """Dense up to `begin` steps, then each of `levels` for an equal part of `steps`."""

    begin: int
    steps: int
    levels: Sequence[float]

    def __post_init__(self) -> None:
        """A step must not be denser than the one before it."""
        levels = list(self.levels)
        if not levels or levels != sorted(levels) or not 0 <= levels[0] <= levels[-1] < 1:
            raise StrategyError(
                f"strategy.dgc_configs.sparsity: got {levels}, expected at least one number from 0 "
                "to below 1, none smaller than the one before it, such as [0.75, 0.9375, 0.999]"
            )

    def at(self, step: int) -> float | None:
        """The part of the values that is not sent in a step, counted from 0; None: all are."""
        behind = step - self.begin
        if behind < 0:
            return None
        return self.levels[min(behind * len(self.levels) // self.steps, len(self.levels) - 1)]
