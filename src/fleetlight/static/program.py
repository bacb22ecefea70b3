# SPDX-License-Identifier: Apache-2.0
"""`Program`: a training step or an evaluation as one graph, with the state that it works on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fleetlight.errors import PlanError
from fleetlight.static import text
from fleetlight.static.evaluation import evaluation
from fleetlight.static.feeds import Feed
from fleetlight.static.form import Form, Pass
from fleetlight.static.runners import Alone, Runner
from fleetlight.static.source import Source
from fleetlight.static.state import Slot


class Program:
    """One graph for forward, backward and the optimizer's step, rewritten by passes.

    Its state is that of the live module and optimizer.
    """

    def __init__(self) -> None:
        #: what is written into it; None for one that is not to be written into
        self.source: Source | None = Source()
        #: what is done to it before it runs, in this order
        self.passes: tuple[Pass, ...] = ()
        #: how its steps are made, with which other processes
        self.runner: Runner = Alone()
        #: the program that must run before it
        self.startup: Program | None = None
        #: the programs that wait for this one
        self.begins: list[Program] = []
        self.has_started = False
        #: the model that it trains, and what its state is called by
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self._made: tuple[object, Form] | None = None

    @classmethod
    def of(cls, form: Form) -> Program:
        """A program of a form; nothing more can be written into it."""
        program = cls()
        program.source, program._made = None, (None, form)
        return program

    @property
    def form(self) -> Form:
        """The program as it will run."""
        key = None if self.source is None else (self.source.version, self.passes)
        if self._made is None or self._made[0] != key:
            assert self.source is not None
            form = self.source.form()
            for rewrite in self.passes:
                form = rewrite(form)
            self._made = (key, form)
        return self._made[1]

    @property
    def feeds(self) -> dict[str, Feed]:
        """What each run is given, by name."""
        return {feed.name: feed for feed in self.form.feeds}

    @property
    def state(self) -> tuple[Slot, ...]:
        """The tensors that it reads and changes."""
        return self.form.state

    @property
    def reports(self) -> tuple[str, ...]:
        """A line for each pass: what it has done."""
        return self.form.reports

    def apply(self, *passes: Pass) -> Program:
        """Another program of the same state, rewritten; this one stays as it is."""
        form = self.form
        for rewrite in passes:
            form = rewrite(form)
        program = Program.of(form)
        program.runner, program.startup = self.runner, self.startup
        program.model, program.optimizer = self.model, self.optimizer
        return program

    def clone(self, for_test: bool = False) -> Program:
        """A copy that works on the same state; `for_test` computes as an evaluation does."""
        if not for_test:
            return self.apply()
        source = self.form if self.source is None else self.source.form()
        program = Program.of(evaluation(source))
        program.startup, program.model = self.startup, self.model
        return program

    def parameters(self) -> list[torch.nn.Parameter]:
        """For an optimizer: those of the modules that have been called."""
        if self.source is not None:
            return list(self.source.modules.root.parameters())
        return [s.tensor for s in self.state if isinstance(s.tensor, nn.Parameter)]

    def __str__(self) -> str:
        return text.listing(self.form)

    def summary(self) -> str:
        """What it takes, what it keeps, what the passes did."""
        return text.summary(self.form)

    def explain(self) -> str:
        """The passes, one line each."""
        return "\n".join(
            f"{rewrite.name}: {report}"
            for rewrite, report in zip(self.passes, self.reports, strict=True)
        )

    def written(self) -> Source:
        """Where to write; a program that was loaded or rewritten is as it is."""
        if self.source is None:
            raise PlanError(
                "this program was cloned, loaded or rewritten, so nothing can be added to it; add "
                "to the program that it was made from"
            )
        return self.source


def names_of(names: Iterable[Any]) -> Sequence[str]:
    """Names of what is to be fetched: variables or their names."""
    return [name if isinstance(name, str) else name.name for name in names]
