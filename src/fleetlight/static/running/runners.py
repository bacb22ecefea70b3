# SPDX-License-Identifier: Apache-2.0
"""Runners make the steps of programs; these run in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fleetlight.observe.telemetry.step_times import FORWARD, step_times
from fleetlight.static.graph.form import Code, Form, RunnableProgram
from fleetlight.static.passes.split_ps import SplitPS
from fleetlight.static.running.pulling import pull
from fleetlight.static.writing.recorder import Part
from fleetlight.torch_compat.optimizers import count_as_stepped

#: generates the code of a program for fetched values and parts
Coder = Callable[[RunnableProgram, Sequence[str], Sequence[str]], Code]
P = TypeVar("P", bound=RunnableProgram, contravariant=True)


class Runner(Protocol[P]):
    """Makes the steps of a program."""

    def start(self, program: P) -> None:
        """Send the first values to all workers, before the first run; may be called twice."""

    def run(
        self, program: P, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
    ) -> list[Tensor]:
        """Run once with these feeds and return the wanted values."""

    def batches_ahead(self) -> int:
        """How many batches after the next one it wants to know before that runs."""

    def announce(self, program: P, batches: Sequence[Sequence[Tensor]]) -> None:
        """Before a run: its feeds, and those of the runs after it that are known."""


class RunsAlone:
    """Runners whose runs depend on no later batch."""

    def batches_ahead(self) -> int:
        """Read no batch early."""
        return 0

    def announce(self, program: RunnableProgram, batches: Sequence[Sequence[Tensor]]) -> None:
        """Do nothing."""


class LocalRunner(RunsAlone):
    """Runs in one process."""

    def start(self, program: RunnableProgram) -> None:
        """Do nothing: the modules have their first values."""

    def run(
        self, program: RunnableProgram, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
    ) -> list[Tensor]:
        """Make a step, or the parts that the schedule selects."""
        return make_step(program, coder, feeds, wanted)[0]


class ReadOnlyRunner(RunsAlone):
    """Runs on one worker, with the present rows of tables."""

    def start(self, program: RunnableProgram) -> None:
        """Do nothing: the training program sends the first values."""

    def run(
        self, program: RunnableProgram, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
    ) -> list[Tensor]:
        """Pull rows and run the forward."""
        pull(program.form, feeds, insert=False)
        return run_parts(program, coder, feeds, wanted, ("forward",))


def read_tables(form: Form) -> Form:
    """An evaluation form with the rows of its lookups as inputs."""
    return form if form.split is not None or not form.lookups else SplitPS()(form)


EVERYTHING: tuple[Part, ...] = ("forward", "backward", "update")


def make_step(
    program: RunnableProgram, coder: Coder, feeds: Sequence[Tensor], wanted: Sequence[str]
) -> tuple[list[Tensor], bool]:
    """Run the parts that the schedule selects; return the values, and whether it made a step.

    A run without a step returns the values of the update as they would be now.
    """
    form = program.form
    if form.schedule.is_plain:
        return run_parts(program, coder, feeds, wanted, EVERYTHING), True
    late = [name for name in wanted if form.fetches.get(name, name) in form.late]
    early = [name for name in wanted if name not in late]
    found = run_parts(program, coder, feeds, early, ("forward", "backward"))
    values = dict(zip(early, found, strict=True))
    is_due = form.schedule.count_backward(form.state)
    if is_due and form.schedule.reduces_apart:
        run_parts(program, coder, feeds, (), ("reduction",))
    steps = is_due and form.schedule.unscale(form.state)
    if steps or late:
        found = run_parts(program, coder, feeds, late, ("update",) if steps else ())
        # they may share memory with slots that `restart` clears
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
    """Run some parts of a program on its present state."""
    code = coder(program, wanted, parts)
    state = program.state
    if "backward" in parts or "update" in parts:
        for check in program.form.checks:
            check()
    for slot in state:
        if slot.current is not None or slot.places:
            slot.refresh()
    with torch.no_grad(), step_times.part(FORWARD):
        out = code(*(slot.tensor for slot in state), *feeds)
    if "backward" in parts and program.optimizer is not None:
        # torch's schedulers check the count, even if the step comes later
        count_as_stepped(program.optimizer)
    return out
