# SPDX-License-Identifier: Apache-2.0
"""Runners make the steps of programs: here those of one process, which needs no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fleetlight.static.graph.form import Code, Form, RunnableProgram
from fleetlight.static.passes.split_ps import SplitPS
from fleetlight.static.running.pulling import pull
from fleetlight.static.writing.recorder import Part
from fleetlight.torch_compat.optimizers import count_as_stepped

#: makes the code of a program for some values and parts
Coder = Callable[[RunnableProgram, Sequence[str], Sequence[str]], Code]
P = TypeVar("P", bound=RunnableProgram, contravariant=True)


class Runner(Protocol[P]):
    """How the steps of a program are made."""

    def start(self, program: P) -> None:
        """Before the first run: bring the first values to where they belong. Twice is fine."""

    def run(
        self, program: P, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
    ) -> list[Tensor]:
        """One run with these feeds, which answers the wanted values."""


class LocalRunner:
    """One process that waits for nobody."""

    def start(self, program: RunnableProgram) -> None:
        """The first values are those of the modules as they were made."""

    def run(
        self, program: RunnableProgram, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
    ) -> list[Tensor]:
        """A step, or what its schedule makes of a run."""
        return make_step(program, coder, feeds, wanted)[0]


class ReadOnlyRunner:
    """One worker by itself, with the rows that tables have now."""

    def start(self, program: RunnableProgram) -> None:
        """The values are there, or will be."""

    def run(
        self, program: RunnableProgram, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
    ) -> list[Tensor]:
        """Pull and compute."""
        pull(program.form, feeds, insert=False)
        return run_parts(program, coder, feeds, wanted, ("forward",))


def read_tables(form: Form) -> Form:
    """The form of an evaluation with the rows of its lookups as inputs."""
    return form if form.split is not None or not form.lookups else SplitPS()(form)


EVERYTHING: tuple[Part, ...] = ("forward", "backward", "update")


def make_step(
    program: RunnableProgram, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
) -> tuple[list[Tensor], bool]:
    """A run as the program's schedule wants it; the wanted values, and whether it made a step.

    Of what belongs to the step, a run without one answers what it would be now.
    """
    form = program.form
    if form.schedule.is_plain:
        return run_parts(program, coder, feeds, wanted, EVERYTHING), True
    late = [name for name in wanted if form.fetches.get(name, name) in form.late]
    early = [name for name in wanted if name not in late]
    found = run_parts(program, coder, feeds, early, ("forward", "backward"))
    values = dict(zip(early, found, strict=True))
    is_due = form.schedule.counted(form.state)
    if is_due and form.schedule.reduces_apart:
        run_parts(program, coder, feeds, (), ("reduction",))
    steps = is_due and form.schedule.unscaled(form.state)
    if steps or late:
        found = run_parts(program, coder, feeds, late, ("update",) if steps else ())
        # they may be the very slots that are about to be emptied
        values |= {name: value.clone() for name, value in zip(late, found, strict=True)}
    if is_due:
        form.schedule.restart(form.state)
    return [values[name] for name in wanted], steps


def run_parts(
    program: RunnableProgram,
    coder: Coder,
    feeds: Sequence[Tensor],
    wanted: Sequence[str],
    parts: Sequence[str],
) -> list[Tensor]:
    """Run some parts of a program on its state as it is now."""
    code = coder(program, wanted, parts)
    state = program.state
    if "backward" in parts or "update" in parts:
        for check in program.form.checks:
            check()
    for slot in state:
        if slot.current is not None or slot.places:
            slot.refresh()
    with torch.no_grad():
        out = code(*(slot.tensor for slot in state), *feeds)
    if "backward" in parts and program.optimizer is not None:
        # torch's schedulers look at it, also where the step is made later
        count_as_stepped(program.optimizer)
    return out
