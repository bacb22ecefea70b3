# SPDX-License-Identifier: Apache-2.0
"""`Program`: a training step or an evaluation as one graph, with its state."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from fleetlight.checkpoint.storage.generations import Directory
from fleetlight.data.read_ahead import ReadAhead
from fleetlight.errors import ConfigError, PlanError
from fleetlight.static import drawing
from fleetlight.static.drawing import text
from fleetlight.static.files import saving
from fleetlight.static.files.document import ON_SERVERS
from fleetlight.static.graph.evaluation import evaluation
from fleetlight.static.graph.feeds import Feed
from fleetlight.static.graph.form import Form, Pass
from fleetlight.static.graph.state import Slot
from fleetlight.static.graph.variable import Variable
from fleetlight.static.ops.norms import SYNCED_NORM
from fleetlight.static.ops.reductions import REDUCE
from fleetlight.static.running.options import RunOptions
from fleetlight.static.running.runners import LocalRunner, ReadOnlyRunner, Runner, read_tables
from fleetlight.static.writing.source import ProgramSource, no_gc

#: operations that communicate with other workers
_EXCHANGES = (REDUCE, SYNCED_NORM)


class StartedLoader(Protocol):
    """A loader whose batches a program takes."""

    @property
    def is_running(self) -> bool:
        """Whether it was started and has batches left."""

    @property
    def batches(self) -> ReadAhead[dict[str, Any]]:
        """The batches left, by the names of the feeds."""

    def take(self) -> dict[str, Any]:
        """The next batch, by the names of the feeds."""

    def ended(self) -> Exception:
        """The signal that it has no more batches."""

    def reset(self) -> None:
        """Drop the batches that are left."""


class Program:
    """One graph for forward, backward and the optimizer's step, rewritten by passes.

    Its state is that of the live module and optimizer.

    Example:
        >>> program = fleet.static.capture(nn.Linear(4, 1), None, None, {"x": torch.zeros(2, 4)})
        >>> for feed in program.feeds.values():
        ...     print(feed)
        x: float32[?, 4]
    """

    def __init__(self) -> None:
        #: the recorder and its modules; None for a program that cannot be extended
        self.source: ProgramSource | None = ProgramSource()
        self.source.recorder.owner = weakref.ref(self)
        #: the source of the program that it was cloned from, which may get names later
        self.origin: ProgramSource | None = None
        #: passes that rewrite it before it runs, in this order
        self.passes: tuple[Pass, ...] = ()
        #: makes its steps, alone or with other processes
        self.runner: Runner[Program] = LocalRunner()
        self.options = RunOptions()
        #: the program that must run before it
        self.startup: Program | None = None
        #: the programs that need this startup program to run first
        self.starts: list[Program] = []
        self.has_started = False
        #: the loader that was started for it
        self.loader: StartedLoader | None = None
        #: the model that it trains, whose names the state has
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        #: True when its gradients are clipped
        self.clips = False
        self._made: tuple[object, Form] | None = None

    @classmethod
    def of(cls, form: Form) -> Program:
        """A program of a form; it cannot be extended."""
        program = cls()
        program.source, program._made = None, (None, form)
        program.mark_started()
        return program

    def mark_started(self) -> None:
        """Give it a startup program that does nothing and need not run."""
        self.startup, self.has_started = Program(), True

    def _share_startup(self, other: Program) -> None:
        """Use the startup program of another program."""
        if other.startup is not None:
            self.startup, self.has_started = other.startup, other.has_started

    @property
    def form(self) -> Form:
        """The program as it will run."""
        # a copy: the user may assign a list and change it later
        key = None if self.source is None else (self.source.version, tuple(self.passes))
        if self._made is None or self._made[0] != key:
            assert self.source is not None
            with no_gc():
                form = self.source.form()
                for rewrite in self.passes:
                    form = rewrite(form)
            if self._made is not None:
                _carry_over(self._made[1].state, form.state)
            self._made = (key, form)
        return self._made[1]

    @property
    def feeds(self) -> dict[str, Feed]:
        """The inputs of each run, by name."""
        return {feed.name: feed for feed in self.form.feeds}

    @property
    def state(self) -> tuple[Slot, ...]:
        """The tensors that it reads and changes."""
        return self.form.state

    @property
    def reports(self) -> tuple[str, ...]:
        """One line for each pass about its changes."""
        return self.form.reports

    def apply(self, *passes: Pass) -> Program:
        """Another program of the same state, rewritten; this one does not change."""
        form = self.form
        for rewrite in passes:
            form = rewrite(form)
        program = Program.of(form)
        program._share_startup(self)
        program.runner = self.runner
        program.options, program.origin = self.options, self.origin or self.source
        program.model, program.optimizer = self.model, self.optimizer
        return program

    def clone(self, for_test: bool = False) -> Program:
        """A copy that works on the same state; `for_test` computes as an evaluation does."""
        if not for_test:
            return self.apply()
        source = self.form if self.source is None else self.source.form()
        program = Program.of(read_tables(evaluation(source)))
        if program.form.split is not None:
            program.runner = ReadOnlyRunner()
        program._share_startup(self)
        program.model = self.model
        program.origin = self.origin or self.source
        return program

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of the called modules, for an optimizer."""
        if self.source is not None:
            return self.source.modules.parameters()
        return [s.tensor for s in self.state if isinstance(s.tensor, nn.Parameter)]

    def __str__(self) -> str:
        return text.listing(self.form)

    def summary(self) -> str:
        """Its inputs, its state, and the changes by passes."""
        return text.summary(self.form)

    def explain(self) -> str:
        """The passes, one line each."""
        return text.explanation([rewrite.name for rewrite in self.passes], self.reports)

    def draw(self, path: str | os.PathLike[str] | None = None) -> drawing.Drawing:
        """A picture of its modules and the values between them.

        `path`: a file to write. `.dot` and `.mmd` (Mermaid) need no other program; Graphviz makes
        `.svg`, `.png` and `.pdf`.
        """
        where = None if path is None else drawing.checked_path(path)
        made = drawing.drawing_of(self.form, self.model, self.optimizer)
        if where is not None:
            made.save(where)
        return made

    def set_learning_rate(self, value: float, group: int = 0) -> None:
        """Set the learning rate of a param group from the next run on."""
        rates = {slot.name: slot for slot in self.state if slot.kind == "rate"}
        slot = rates.get(f"group {group}")
        if slot is None:
            raise ConfigError(
                f"set_learning_rate: got group {group}, expected one of this program: "
                f"{', '.join(rates) or 'it has no optimizer'}"
            )
        if self.optimizer is None:
            slot.tensor.fill_(value)
        else:
            self.optimizer.param_groups[group]["lr"] = value

    def save(self, dirname: Directory) -> None:
        """Write the program and its state for `load_program`, without communication.

        A crash leaves the previous files. In a job, save on one worker.
        """
        if self.form.lookups or self.form.split is not None:
            raise PlanError(f"Program.save: {ON_SERVERS}")
        saving.save(dirname, self._one_worker_form())

    def _one_worker_form(self) -> Form:
        """The form before the first pass that adds communication."""
        if self.source is None:
            return self.form
        form = self.source.form()
        for rewrite in self.passes:
            after = rewrite(form)
            if any(node.target in _EXCHANGES for node in after.graph.nodes):
                break
            form = after
        # passes make new state each time; the current values are in the program's own state
        own = {(slot.kind, slot.name): slot for slot in self.state}
        state = (slot if slot in self.state else own[slot.kind, slot.name] for slot in form.state)
        return dataclasses.replace(form, state=tuple(state))

    def writable_source(self) -> ProgramSource:
        """The source to extend; an error for a program that was loaded or rewritten."""
        if self.source is None:
            raise PlanError(
                "this program was cloned, loaded or rewritten, so it cannot be extended; extend "
                "the program that it was made from"
            )
        return self.source

    def names_of(self, wanted: Iterable[Any]) -> Sequence[str]:
        """The names of variables in this program; a name stays a name."""
        given = [one if isinstance(one, str) else self._name_of(one) for one in wanted]
        if self.origin is None:
            return given
        later = self.origin.recorder.names
        return [
            later[name].name if name in later and name not in self.form.fetches else name
            for name in given
        ]

    def _name_of(self, variable: Any) -> str:
        """The name of a variable of this program: others may use the name for another value."""
        if not isinstance(variable, Variable):
            raise ConfigError(
                f"fetch: got a {type(variable).__name__}, expected a variable of the program, "
                "or its name"
            )
        source = self.origin or self.source
        if source is None or variable.writer is not source.recorder:
            raise ConfigError(
                f"fetch: {variable!r} belongs to another program; fetch it from that one, or here "
                f"by its name, fetch_list=[{variable.name!r}]"
            )
        return variable.name


def _carry_over(before: Iterable[Slot], now: Iterable[Slot]) -> None:
    """Keep the state of passes when the program is extended."""
    known = {(slot.kind, slot.name): slot.tensor for slot in before}
    for slot in now:
        if slot.kind in ("gradient", "schedule"):
            slot.tensor = known.get((slot.kind, slot.name), slot.tensor)


def load_program(dirname: Directory, device: str | torch.device | None = None) -> Program:
    """Load what `Program.save` wrote: it runs without its model and its optimizer.

    It has its own state. Load only files that you trust: a graph becomes code, though only of
    torch's operations.

    Args:
        dirname: the folder or URL.
        device: the device of the state; by default the devices at the save.

    Returns:
        A `Program` that can run and cannot be extended.

    Raises:
        CheckpointError: the files cannot be read.

    Example:
        >>> program = fleet.static.capture(nn.Linear(4, 1), None, None, {"x": torch.zeros(2, 4)})
        >>> program.save("program")
        >>> list(fleet.static.load_program("program").feeds)
        ['x']
    """
    return Program.of(saving.load(dirname, device))


def names_of(names: Iterable[Any]) -> Sequence[str]:
    """The names of variables; a name stays a name."""
    return [name if isinstance(name, str) else name.name for name in names]
