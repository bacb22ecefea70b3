# SPDX-License-Identifier: Apache-2.0
"""Who makes the steps of a program: one process alone, or together with others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fleetlight.static.program import Program

#: makes the code of a program for some values and parts
Coder = Callable[["Program", Sequence[str], Sequence[str]], Callable[..., list[Tensor]]]


class Runner(Protocol):
    """How the steps of a program are made."""

    def start(self, program: Program) -> None:
        """Before the first run: bring the first values to where they belong. Twice is fine."""

    def run(
        self, program: Program, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
    ) -> list[Tensor]:
        """One run with these feeds, which answers the wanted values."""


class Alone:
    """One process that waits for nobody."""

    def start(self, program: Program) -> None:
        """The first values are those of the modules as they were made."""

    def run(
        self, program: Program, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
    ) -> list[Tensor]:
        """Forward, backward and step at once."""
        return run_parts(program, coder, feeds, wanted, EVERYTHING)


EVERYTHING = ("forward", "backward", "update")


def run_parts(
    program: Program,
    coder: Coder,
    feeds: Sequence[Tensor],
    wanted: Sequence[str],
    parts: Sequence[str],
) -> list[Tensor]:
    """Run some parts of a program on its state as it is now."""
    code = coder(program, wanted, parts)
    state = program.state
    for slot in state:
        slot.refresh()
    with torch.no_grad():
        out = code(*(slot.tensor for slot in state), *feeds)
    if "update" in parts and program.optimizer is not None:
        # torch's schedulers look at it
        program.optimizer._opt_called = True  # type: ignore[attr-defined]
    return out
