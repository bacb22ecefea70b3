# SPDX-License-Identifier: Apache-2.0
"""When workers that train alone average their parameters. Pure: no clock, no tensors.

Steps count from 1. Workers make steps up to `begin_step` together, and later ones alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


class FixedInterval:
    """Averaging after every k local steps."""

    def __init__(self, k: int, begin_step: int) -> None:
        self.k = k
        self.begin_step = begin_step
        #: steps made so far
        self.step = 0
        #: the last step after which the workers were equal
        self.last = 0

    @property
    def next_is_local(self) -> bool:
        """True when the next step is local."""
        return self.step >= self.begin_step

    @property
    def differs(self) -> bool:
        """True after local steps since the workers were equal."""
        return self.step > self.last

    @property
    def averages_next(self) -> bool:
        """True when the workers average after the next step."""
        # k may have become smaller since the last averaging
        return self.next_is_local and self.step + 1 - self.last >= self.k

    def step_made(self) -> bool:
        """Count a step; returns True when the workers average after it."""
        was_local, averages = self.next_is_local, self.averages_next
        self.step += 1
        if not was_local:
            self.last = self.step
        return averages

    def averaged(self) -> None:
        """The workers are equal."""
        self.last = self.step

    def restart_at(self, step: int) -> None:
        """Continue with equal workers after a step that was made elsewhere."""
        self.step = self.last = step

    def state(self) -> dict[str, int | float | None]:
        """The state from which another job continues."""
        return {"step": self.step, "last": self.last}

    def load(self, state: Mapping[str, int | float | None]) -> None:
        """Load a state, even that of another kind of schedule."""
        self.step = int(state["step"] or 0)
        self.last = int(state["last"] or 0)


class AdaptiveInterval(FixedInterval):
    """Workers average more often as their loss falls, and less often as the learning rate falls.

    When workers average, k = ceil(init_k * sqrt(lr_0 / lr * loss / loss_0)), from 1 to max_k, where
    loss_0 and lr_0 are those of the first step (AdaComm, with time counted in steps).
    """

    def __init__(self, init_k: int, max_k: int, begin_step: int) -> None:
        super().__init__(min(init_k, max_k), begin_step)
        self.init_k = init_k
        self.max_k = max_k
        self.loss_0: float | None = None
        self.lr_0: float | None = None

    @property
    def wants_first(self) -> bool:
        """True until there is a first loss to compare later ones with."""
        return self.loss_0 is None

    def first(self, loss: float, lr: float) -> None:
        """Set the loss that later ones are compared with; ignores one that is not finite."""
        if math.isfinite(loss):
            self.loss_0, self.lr_0 = loss, lr

    def adapt(self, loss: float, lr: float) -> None:
        """Choose the next k by the mean loss of all workers when they average."""
        if self.loss_0 is None or self.lr_0 is None or math.isnan(loss):
            return
        below = lr * self.loss_0
        ratio = math.inf if below == 0 else max(0.0, self.lr_0 * loss / below)
        wanted = self.init_k * math.sqrt(ratio)
        self.k = self.max_k if wanted >= self.max_k else max(1, math.ceil(wanted))

    def state(self) -> dict[str, int | float | None]:
        """As in `FixedInterval`, with what k depends on."""
        return {**super().state(), "k": self.k, "loss_0": self.loss_0, "lr_0": self.lr_0}

    def load(self, state: Mapping[str, int | float | None]) -> None:
        """Load a state; without a loss, the next step gives the first one."""
        super().load(state)
        self.k = min(self.max_k, int(state.get("k") or self.init_k))
        self.loss_0, self.lr_0 = state.get("loss_0"), state.get("lr_0")
