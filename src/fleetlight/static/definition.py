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

#: example sizes while a program is written; they differ, so that none is taken for another
_EXAMPLES = (7, 11, 13, 17, 19)


class Distributor(Protocol):
    """The part of an optimizer that trains with other processes."""

    def register(self, program: Program) -> Collection[Part]:
        """Register a program; return the parts of its training that this process writes."""

    def distribute(self, program: Program) -> None:
        """Let all processes make the steps of the program together."""


class _Written:
    """The default programs, and those of the active guards."""

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
    if main not in startup.starts:
        startup.starts.append(main)


_written = _Written()


def default_main_program() -> Program:
    """The program being written: that of the innermost guard, or that of the process.

    Returns:
        A `Program`.

    Example:
        >>> program = fleet.static.Program()
        >>> with fleet.static.program_guard(program):
        ...     fleet.static.default_main_program() is program
        True
    """
    return _written.now()[0]


def default_startup_program() -> Program:
    """The startup program, which runs once before the default main program.

    Returns:
        A `Program`.

    Example:
        >>> executor = fleet.static.Executor()
        >>> executor.run(fleet.static.default_startup_program())
        []
    """
    return _written.now()[1]


def reset_default_programs() -> None:
    """Replace the default programs by empty ones."""
    _written.main, _written.startup = Program(), Program()
    _pair(_written.main, _written.startup)
    _written.is_open = False
    leave_writing()


def leave_writing(run: Program | None = None) -> None:
    """Restore torch's own calls of modules if no program is being written.

    The default program is being written until its first run.
    """
    if run is _written.main:
        _written.is_open = False
    if not _written.guarded and not _written.is_open:
        calls.unwatch()


@contextlib.contextmanager
def program_guard(main: Program, startup: Program | None = None) -> Iterator[None]:
    """Inside the block, `data` belongs to `main`, which waits for `startup` to run.

    Args:
        main: the program to extend.
        startup: the program that runs once before it.

    Yields:
        Nothing.

    Raises:
        ConfigError: an argument is no program.

    Example:
        >>> main, startup = fleet.static.Program(), fleet.static.Program()
        >>> with fleet.static.program_guard(main, startup):
        ...     x = fleet.static.data("x", [None, 4])
        >>> list(main.feeds)
        ['x']
    """
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
    """A tensor that each run feeds by this name. A dimension of None (or -1) has any size.

    Args:
        name: the name of the feed.
        shape: the size of each dimension.
        dtype: the type of the values, such as `torch.int64`.
        device: the device of the values; by default the CPU.

    Returns:
        A tensor without values, with which torch's functions and modules compute.

    Raises:
        ConfigError: the program has a feed of this name, or an argument is wrong.

    Example:
        >>> program = fleet.static.Program()
        >>> with fleet.static.program_guard(program):
        ...     x = fleet.static.data("x", [None, 4])
        ...     total = x.sum()
        >>> executor = fleet.static.Executor()
        >>> _ = executor.run(program.startup)
        >>> executor.run(program, feed={"x": torch.ones(2, 4)}, fetch_list=[total])
        [tensor(8.)]
    """
    note_program()
    source = default_main_program().writable_source()
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

    Args:
        optimizer: an optimizer of the parameters, registered or not.
        loss: a tensor computed from `static.data`.
        clip_norm: the largest norm of the gradients of all workers together.
        clip_value: the largest absolute value of a gradient.

    Raises:
        PlanError: the loss belongs to no program, or the program has an optimizer already.

    Example:
        >>> program = fleet.static.Program()
        >>> with fleet.static.program_guard(program):
        ...     loss = nn.Linear(4, 1)(fleet.static.data("x", [None, 4])).square().mean()
        ...     optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
        ...     fleet.static.minimize(optimizer, loss)
        >>> program.optimizer is optimizer
        True
    """
    if not is_variable(loss):
        raise PlanError(
            f"minimize: got a {type(loss).__name__}, expected the loss of a program, computed from "
            "static.data(...)"
        )
    variable = cast(Variable, loss)
    program = program_of(variable)
    source = program.writable_source()
    if program.optimizer is not None:
        raise PlanError("minimize: the program has an optimizer already; a program has one")
    clip = Clip(clip_norm, clip_value)
    source.recorder.names.setdefault("loss", source.recorder.node_of(variable))
    try:
        train(program, variable, source.modules.root, optimizer, clip)
    except PlanError:
        # the script may try another loss or optimizer
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
    """Write backward and step of a model, and register them with the other processes."""
    optimizers.check(optimizer)
    distributor: Distributor | None = getattr(optimizer, "distributor", None)
    source = program.writable_source()
    program.model, program.optimizer = model, optimizer
    program.clips = bool(clip)
    source.modules.name_state(model)
    parts = EVERYTHING if distributor is None else distributor.register(program)
    if "backward" not in parts:
        return
    names = {id(p): name for name, p in model.named_parameters()}
    gradients = write_backward(source.recorder, loss, names, optimizer)
    if "update" in parts:
        tables.refuse_without_servers(source.recorder.lookups, model)
        write_step(source.recorder, optimizer, names, clip.write(source.recorder, gradients))
    elif clip:
        raise PlanError(
            "parameter servers make the steps of this program, so it cannot clip its "
            "gradients; train eagerly with fleet.clip_grad_norm_"
        )
    if distributor is not None:
        distributor.distribute(program)


def program_of(variable: Variable) -> Program:
    """The program to which a variable belongs."""
    owner = cast(Recorder, variable.writer).owner()
    if not isinstance(owner, Program):
        raise PlanError(f"{variable!r} belongs to a deleted program; keep a reference to it")
    return owner


@names_arguments
def accuracy(input: Tensor, label: Tensor, k: int = 1) -> Tensor:
    """The share of records whose label is among the k largest inputs.

    Args:
        input: the scores of all classes, of shape `[records, classes]`.
        label: the class of each record.
        k: how many of the largest scores count.

    Returns:
        A number between 0 and 1; also outside programs.

    Example:
        >>> fleet.static.accuracy(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
        tensor(0.5000)
    """
    top = input.topk(k, dim=-1).indices
    return (top == label.reshape(-1, 1)).any(dim=-1).to(torch.float32).mean()
