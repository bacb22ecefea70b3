# SPDX-License-Identifier: Apache-2.0
"""Why gradients were not reduced during backward, by what the script did before.

A replica notes each forward of its module, each step, and the first gradient after a reduction.
"""

from __future__ import annotations

import enum


class Forward(enum.Enum):
    """How the module itself was called."""

    WHOLE = enum.auto()
    HELD = enum.auto()
    EVAL = enum.auto()


class Cause(enum.Enum):
    """What the script did, and how to let backward reduce."""

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
        "another backward() ran after the one that reduced them",
        "add up the losses of one forward, and call backward() once",
    )
    ASSIGNED = (
        "no backward() has made them since the last step",
        "call loss.backward(); torch.autograd.grad and assignments to .grad do not reduce",
    )
    #: at a first step, before backwards are watched
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
    """Follows one module between reductions, and explains late gradients."""

    def __init__(self) -> None:
        self._forward: Forward | None = None
        self._cause = Cause.UNKNOWN
        self._reduced_in_step = False
        self._advised: set[str] = set()

    def called(self, forward: Forward) -> None:
        """Note a call of the module itself, with gradients enabled."""
        self._forward = forward

    def touched(self) -> None:
        """Note the first gradient of a backward after a reduction."""
        if self._forward is not None:
            self._cause = _BY_FORWARD[self._forward]
        else:
            self._cause = Cause.AGAIN if self._reduced_in_step else Cause.PARTS

    def marked(self, cause: Cause) -> None:
        """Note gradients that came from no known backward of this module."""
        self._cause = cause

    def reduced(self, *, during_backward: bool) -> None:
        """Note that all gradients are reduced."""
        self._forward, self._cause = None, Cause.UNKNOWN
        self._reduced_in_step = self._reduced_in_step or during_backward

    def stepped(self) -> None:
        """Note a step of an optimizer."""
        self._reduced_in_step = False

    def warning(self) -> str | None:
        """The warning before late gradients are reduced; None where the advice was given before."""
        what, instead = self._cause.value
        if instead in self._advised:
            return None
        self._advised.add(instead)
        return (
            f"gradients were not reduced during backward: {what}; reducing them before the step, "
            f"without overlap. For overlap, {instead}"
        )
