# SPDX-License-Identifier: Apache-2.0
"""When workers that train alone meet. Pure: steps and losses come in, no clock, no tensors.

Steps are counted from 1. Up to `begin_step` they are made together, behind it alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


class FixedInterval:
    """A meeting behind every k steps made alone."""

    def __init__(self, k: int, begin_step: int) -> None:
        self.k = k
        self.begin_step = begin_step
        #: steps made so far
        self.step = 0
        #: the step behind which the workers were equal last
        self.last = 0

    @property
    def alone(self) -> bool:
        """True when the coming step is made alone."""
        return self.step >= self.begin_step

    @property
    def apart(self) -> bool:
        """True when steps were made alone since the workers were equal."""
        return self.step > self.last

    @property
    def meets_next(self) -> bool:
        """True when the workers meet behind the coming step."""
        # k may have become smaller since they met
        return self.alone and self.step + 1 - self.last >= self.k

    def step_made(self) -> bool:
        """Count a step; answers whether the workers meet behind it."""
        was_alone, meets = self.alone, self.meets_next
        self.step += 1
        if not was_alone:
            self.last = self.step
        return meets

    def met(self) -> None:
        """The workers are equal."""
        self.last = self.step

    def begin_anew(self, step: int) -> None:
        """Equal workers go on behind a step that was made elsewhere."""
        self.step = self.last = step

    def state(self) -> dict[str, int | float | None]:
        """All that another job needs to go on from here."""
        return {"step": self.step, "last": self.last}

    def load(self, state: Mapping[str, int | float | None]) -> None:
        """Take up a state; of another kind of schedule, what both have."""
        self.step = int(state["step"] or 0)
        self.last = int(state["last"] or 0)


class AdaptiveInterval(FixedInterval):
    """Workers meet the more often the smaller their loss is, and the less the smaller the rate.

    At a meeting, k = ceil(init_k * sqrt(lr_0 / lr * loss / loss_0)), from 1 to max_k, where loss_0
    and lr_0 are those of the first step (AdaComm, with meetings counted in steps, not seconds).
    """

    def __init__(self, init_k: int, max_k: int, begin_step: int) -> None:
        super().__init__(min(init_k, max_k), begin_step)
        self.init_k = init_k
        self.max_k = max_k
        self.loss_0: float | None = None
        self.lr_0: float | None = None

    @property
    def wants_first(self) -> bool:
        """True as long as nothing is known to compare a loss with."""
        return self.loss_0 is None

    def first(self, loss: float, lr: float) -> None:
        """What the losses to come are compared with; one that is no number tells nothing."""
        if math.isfinite(loss):
            self.loss_0, self.lr_0 = loss, lr

    def adapt(self, loss: float, lr: float) -> None:
        """Find the next k, from the mean loss of all workers at a meeting."""
        if self.loss_0 is None or self.lr_0 is None or math.isnan(loss):
            return
        below = lr * self.loss_0
        ratio = math.inf if below == 0 else max(0.0, self.lr_0 * loss / below)
        wanted = self.init_k * math.sqrt(ratio)
        self.k = self.max_k if wanted >= self.max_k else max(1, math.ceil(wanted))

    def state(self) -> dict[str, int | float | None]:
        """As for every schedule, and what k follows."""
        return {**super().state(), "k": self.k, "loss_0": self.loss_0, "lr_0": self.lr_0}

    def load(self, state: Mapping[str, int | float | None]) -> None:
        """Take up a state; one without a loss leaves the comparison to the next step."""
        super().load(state)
        self.k = min(self.max_k, int(state.get("k") or self.init_k))
        self.loss_0, self.lr_0 = state.get("loss_0"), state.get("lr_0")
