# SPDX-License-Identifier: Apache-2.0
"""Programs written line by line: `data`, `program_guard`, `minimize`, and the default programs."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from fleetlight.errors import ConfigError, PlanError, names_arguments
from fleetlight.static.graph.feeds import feed_of
from fleetlight.static.graph.variable import Variable, is_variable
from fleetlight.static.program import Program
from fleetlight.static.running.runners import EVERYTHING
from fleetlight.static.writing import calls, optimizers, tables
from fleetlight.static.writing.clipping import UNCLIPPED, Clip
from fleetlight.static.writing.recorder import Part, Recorder
from fleetlight.static.writing.source import no_gc
from fleetlight.static.writing.training import write_backward, write_step
from fleetlight.strategy.job import note_program

#: sizes that are looked at while a program is written; different ones, so that none is taken for
#: another
_EXAMPLES = (7, 11, 13, 17, 19)


class Distributor(Protocol):
    """What an optimizer has that trains with other processes."""

    def takes(self, program: Program) -> Collection[Part]:
        """Register a program; answers what of its training this process does."""

    def distribute(self, program: Program) -> None:
        """Have its steps made together."""


class _Written:
    """The programs that are being written."""

    def __init__(self) -> None:
        self.main, self.startup = Program(), Program()
        _pair(self.main, self.startup)
        #: innermost last
        self.guarded: list[tuple[Program, Program]] = []
        #: True from the first feed of the default program to its first run
        self.is_open = False

    def now(self) -> tuple[Program, Program]:
        return self.guarded[-1] if self.guarded else (self.main, self.startup)


def _pair(main: Program, startup: Program) -> None:
    main.startup = startup
    if main not in startup.begins:
        startup.begins.append(main)


_written = _Written()


def default_main_program() -> Program:
    """The program that is written now: that of the guard, or the one of the process."""
    return _written.now()[0]


def default_startup_program() -> Program:
    """The program that runs once before it."""
    return _written.now()[1]


def reset_default_programs() -> None:
    """New programs of the process, in which nothing is written."""
    _written.main, _written.startup = Program(), Program()
    _pair(_written.main, _written.startup)
    _written.is_open = False
    leave_writing()


def leave_writing(run: Program | None = None) -> None:
    """Where nothing is being written, modules are called as torch calls them.

    The default program is being written until it is run.
    """
    if run is _written.main:
        _written.is_open = False
    if not _written.guarded and not _written.is_open:
        calls.unwatch()


@contextlib.contextmanager
def program_guard(main: Program, startup: Program | None = None) -> Iterator[None]:
    """Inside the block, `data` belongs to `main`, which waits for `startup` to run."""
    for program in (main, startup):
        if program is not None and not isinstance(program, Program):
            raise ConfigError(
                f"program_guard: got a {type(program).__name__}, expected a static.Program"
            )
    start = startup or main.startup or Program()
    _pair(main, start)
    _written.guarded.append((main, start))
    calls.watch()
    try:
        yield
    finally:
        _written.guarded.pop()
        leave_writing()


@names_arguments
def data(
    name: str,
    shape: Sequence[int | None],
    dtype: Any = torch.float32,
    device: str | torch.device | None = None,
) -> Tensor:
    """A tensor that each run is given by this name. A size of None (or -1) may be any."""
    note_program()
    source = default_main_program().written()
    feed = feed_of(name, shape, dtype)
    if name in source.recorder.feeds:
        raise ConfigError(f"data {name!r}: the program has a feed of this name already")
    sizes = [
        size or _EXAMPLES[min(place, len(_EXAMPLES) - 1)] for place, size in enumerate(feed.shape)
    ]
    _written.is_open = _written.is_open or not _written.guarded
    calls.watch()
    example = torch.zeros(sizes, dtype=feed.dtype, device=device)
    return source.recorder.feed(feed, example, is_invented=True)


@names_arguments
def minimize(
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> None:
    """Write backward and the optimizer's step into the program of the loss.

    `clip_norm`, `clip_value`: what gradients may be at most, as in torch.nn.utils.clip_grad_norm_
    and clip_grad_value_; those of all workers together.
    """
    if not is_variable(loss):
        raise PlanError(
            f"minimize: got a {type(loss).__name__}, expected the loss of a program, computed from "
            "static.data(...)"
        )
    variable = cast(Variable, loss)
    program = program_of(variable)
    source = program.written()
    if program.optimizer is not None:
        raise PlanError("minimize: the program has an optimizer already; a program has one")
    clip = Clip(clip_norm, clip_value)
    source.recorder.names.setdefault("loss", source.recorder.node_of(variable))
    try:
        train(program, variable, source.modules.root, optimizer, clip)
    except PlanError:
        # another loss or optimizer may do
        program.optimizer = None
        raise


@no_gc()
def train(
    program: Program,
    loss: Variable,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip: Clip = UNCLIPPED,
) -> None:
    """Write backward and step for a model, and have them made with the other processes."""
    optimizers.check(optimizer)
    distributor: Distributor | None = getattr(optimizer, "distributor", None)
    source = program.written()
    program.model, program.optimizer = model, optimizer
    program.clips = bool(clip)
    source.modules.name_state(model)
    parts = EVERYTHING if distributor is None else distributor.takes(program)
    if "backward" not in parts:
        return
    names = {id(p): name for name, p in model.named_parameters()}
    gradients = write_backward(source.recorder, loss, names, optimizer)
    if "update" in parts:
        tables.refuse_without_servers(source.recorder.lookups, model)
        write_step(source.recorder, optimizer, names, clip.write(source.recorder, gradients))
    elif clip:
        raise PlanError(
            "parameter servers make the steps of this program, and its gradients cannot be "
            "clipped on the way; train eagerly with fleet.clip_grad_norm_"
        )
    if distributor is not None:
        distributor.distribute(program)


def program_of(variable: Variable) -> Program:
    """The program in which a variable is written."""
    owner = cast(Recorder, variable.writer).owner()
    if not isinstance(owner, Program):
        raise PlanError(f"{variable!r} belongs to a program that is gone; keep the program")
    return owner


@names_arguments
def accuracy(input: Tensor, label: Tensor, k: int = 1) -> Tensor:
    """The share of records whose label is among the k largest inputs."""
    top = input.topk(k, dim=-1).indices
    return (top == label.reshape(-1, 1)).any(dim=-1).to(torch.float32).mean()
