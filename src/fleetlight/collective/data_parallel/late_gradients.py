# SPDX-License-Identifier: Apache-2.0
"""Why gradients were not reduced during backward: what came before them tells.

A replica notes each forward of its module, each step, and the first gradient that comes behind a
reduction. Nothing of that costs anything.
"""

from __future__ import annotations

import enum


class Forward(enum.Enum):
    """How the module itself was called."""

    WHOLE = enum.auto()
    HELD = enum.auto()
    EVAL = enum.auto()


class Cause(enum.Enum):
    """What was done, and what to do for backward to reduce."""

    EVAL = (
        "the model was in eval() mode at its forward",
        "call model.train() before, and eval() on single layers only",
    )
    HELD = (
        "the forward was made inside fleet.no_sync()",
        "make the last forward and backward of a step outside that block",
    )
    PARTS = (
        "parts of the model were called, and the model itself was not",
        "call model(...), whose forward calls its parts",
    )
    AGAIN = (
        "another backward() came after the one that reduced them",
        "add up the losses of one forward, and call backward() once",
    )
    ASSIGNED = (
        "no backward() has made them since the last step",
        "call loss.backward(); torch.autograd.grad and assignments to .grad do not reduce",
    )
    #: at a first step, where nobody has looked at backwards yet
    UNCALLED = (
        "the model itself was not called before the step",
        "call model(...), whose forward calls its parts",
    )
    CHANGED = (
        "parameters were added, frozen or unfrozen between forward and step",
        "do so before the forward",
    )
    UNKNOWN = ("the cause is not known", "call model(...), then loss.backward() once")


_BY_FORWARD = {Forward.HELD: Cause.HELD, Forward.EVAL: Cause.EVAL, Forward.WHOLE: Cause.UNKNOWN}


class LateGradients:
    """Follows one module from reduction to reduction, and says why gradients are late."""

    def __init__(self) -> None:
        self._forward: Forward | None = None
        self._cause = Cause.UNKNOWN
        self._reduced_in_step = False
        self._said: set[str] = set()

    def called(self, forward: Forward) -> None:
        """The module itself was called, with gradients enabled."""
        self._forward = forward

    def touched(self) -> None:
        """A backward has made the first gradient behind a reduction."""
        if self._forward is not None:
            self._cause = _BY_FORWARD[self._forward]
        else:
            self._cause = Cause.AGAIN if self._reduced_in_step else Cause.PARTS

    def marked(self, cause: Cause) -> None:
        """Gradients are there that no backward of this module is known to have made."""
        self._cause = cause

    def reduced(self, *, during_backward: bool) -> None:
        """All gradients are reduced."""
        self._forward, self._cause = None, Cause.UNKNOWN
        self._reduced_in_step = self._reduced_in_step or during_backward

    def stepped(self) -> None:
        """An optimizer has used them."""
        self._reduced_in_step = False

    def warning(self) -> str | None:
        """What to say before late gradients are reduced; None where the advice was given before."""
        what, instead = self._cause.value
        if instead in self._said:
            return None
        self._said.add(instead)
        return (
            f"gradients were not reduced during backward: {what}; reducing them before the step, "
            f"without overlap. For overlap, {instead}"
        )
