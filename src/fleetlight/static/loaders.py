# SPDX-License-Identifier: Apache-2.0
"""Loaders bound to the feeds of a program: the script or the executor reads their batches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fleetlight.data.read_ahead import ReadAhead
from fleetlight.errors import ConfigError, did_you_mean, names_arguments
from fleetlight.static.definition import default_main_program, program_of
from fleetlight.static.graph.variable import Variable
from fleetlight.static.program import Program

Batch = dict[str, Any]


class EndOfData(Exception):
    """A started loader has no more batches: call its `reset()`, then `start()` for an epoch.

    A signal like Python's StopIteration, so it is not a `FleetError`.

    Example:
        >>> program = fleet.static.Program()
        >>> with fleet.static.program_guard(program):
        ...     total = fleet.static.data("x", [None]).sum()
        >>> executor = fleet.static.Executor()
        >>> _ = executor.run(program.startup)
        >>> loader = fleet.static.bind([[torch.ones(2)]], ["x"], program)
        >>> loader.start()
        >>> try:
        ...     while True:
        ...         print(executor.run(program, fetch_list=[total]))
        ... except fleet.static.EndOfData:
        ...     loader.reset()
        [tensor(2.)]
    """


class BoundLoader:
    """Yields each batch of a loader as a dict for `exe.run(program, feed=...)`.

    After `start()`, runs of the program without `feed` take the batches, until `EndOfData`; then
    call `reset()`. Iteration is independent of that.
    """

    def __init__(self, loader: Iterable[Any], names: Sequence[str], program: Program) -> None:
        self.loader, self.names, self.program = loader, tuple(names), program
        self._iterator: Iterator[Any] | None = None
        self._batches: ReadAhead[Batch] | None = None
        self._is_at_end = False

    def __iter__(self) -> Iterator[Batch]:
        return (named(self.names, batch) for batch in self.loader)

    def __call__(self) -> Iterator[Batch]:
        """Iterate, as in `for batch in loader():`."""
        return iter(self)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    @property
    def is_started(self) -> bool:
        """Whether runs of the program take batches from it."""
        return self._batches is not None

    @property
    def is_running(self) -> bool:
        """Whether it was started and no run has reached its end."""
        return self.is_started and not self._is_at_end

    def start(self) -> None:
        """Let runs of the program without feeds take its batches, from the first one."""
        other = self.program.loader
        if other is not None and other.is_running:
            which = "this loader" if other is self else "another loader of the program"
            raise ConfigError(
                f"start: {which} was started and is not at its end; call its reset() first"
            )
        if other is not None:
            other.reset()
        self.program.loader = self
        self._iterator = iter(self.loader)
        self._batches = ReadAhead(map(functools.partial(named, self.names), self._iterator))

    def reset(self) -> None:
        """Drop the remaining batches; `start()` restarts. A second call does nothing."""
        iterator: Any = self._iterator
        self._iterator = self._batches = None
        self._is_at_end = False
        if self.program.loader is self:
            self.program.loader = None
        if hasattr(iterator, "close"):
            # a generator may restore something, such as the weight of its last batch
            iterator.close()

    @property
    def batches(self) -> ReadAhead[Batch]:
        """Its remaining batches; some may have been read early."""
        assert self._batches is not None
        return self._batches

    def take(self) -> Batch:
        """The next batch; raises `EndOfData` at the end, until it is reset."""
        batch = None if self._is_at_end else next(self.batches, None)
        if batch is None:
            raise self.ended()
        return batch

    def ended(self) -> EndOfData:
        """The signal that it has no more batches."""
        self._is_at_end = True
        return EndOfData(
            f"the loader of {', '.join(map(repr, self.names))} is at its end; call its reset(), "
            "and start() for the next epoch"
        )


@names_arguments
def bind(
    loader: Iterable[Any], feeds: Sequence[Any] | None = None, program: Program | None = None
) -> BoundLoader:
    """Bind a loader (any iterable of batches) to feeds.

    Args:
        loader: an iterable of batches; a batch has a value for each feed.
        feeds: variables of `static.data` or their names, in the order of the values of a batch;
            None for all feeds of the program.
        program: the program; by default that of the feeds.

    Returns:
        An iterable of dicts for `executor.run(program, feed=...)`. After its `start()`, runs
        without `feed` take its batches.

    Raises:
        ConfigError: the loader is bound already, or the program has no such feed.

    Example:
        >>> program = fleet.static.Program()
        >>> with fleet.static.program_guard(program):
        ...     x = fleet.static.data("x", [None])
        >>> for feed in fleet.static.bind([[torch.ones(2)]], [x], program):
        ...     print(feed)
        {'x': tensor([1., 1.])}
    """
    if isinstance(loader, BoundLoader):
        raise ConfigError("bind: got a loader that is bound already; bind its original loader")
    if not isinstance(loader, Iterable):
        raise ConfigError(f"bind: got a {type(loader).__name__}, expected a loader of batches")
    if isinstance(feeds, (str, Tensor)):
        feeds = [feeds]
    program = program or _program_of(feeds or ())
    known = program.feeds
    names = [_name(program, feed) for feed in (known if feeds is None else feeds)]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"bind: the program has no feed {name!r}: {did_you_mean(name, known)}"
            )
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"bind: got the feeds {names}, expected each of some feeds once")
    return BoundLoader(loader, names, program)


def feeds_of(program: Program, feed: Any, needed: Sequence[str], steps: int) -> ReadAhead[Any]:
    """The feeds of up to `steps` runs in one call: those given, or those of the started loader."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"run: got {steps=!r}, expected a number of steps")
    if isinstance(feed, (list, tuple)):
        return ReadAhead(iter(feed[:steps]))
    if isinstance(feed, Iterator):
        return ReadAhead(itertools.islice(feed, steps))
    if feed is not None:
        raise ConfigError(
            f"run: got {steps=} and a {type(feed).__name__} as feed, expected a list or an "
            "iterator of feeds; a loader would restart in each call: call start() of "
            "static.bind(loader, ...), and give no feed"
        )
    if not needed:
        return ReadAhead(iter([{}] * steps))
    if program.loader is None:
        raise missing_feed(needed)
    return program.loader.batches


def end_of(program: Program, feed: Any) -> Exception:
    """The signal that no batch is left."""
    if feed is None and program.loader is not None:
        return program.loader.ended()
    return EndOfData(
        "run: got no feed for any of the steps, expected a list or an iterator of them"
    )


def missing_feed(needed: Sequence[str]) -> ConfigError:
    """The error of a run without feeds."""
    return ConfigError(
        f"feed {needed[0]!r} is missing: the run got no feed, and no loader was started "
        f"for the program; give feed={{{needed[0]!r}: ...}}, or call start() of a "
        "static.bind(loader, ...)"
    )


def named(names: Sequence[str], batch: Any) -> Batch:
    """The values of a batch by the names of the feeds."""
    if isinstance(batch, Mapping):
        missing = [name for name in names if name not in batch]
        if missing:
            raise ConfigError(
                f"the loader yielded a batch without {missing[0]!r}, to which it is bound: got "
                f"{', '.join(map(repr, batch)) or 'nothing'}"
            )
        return {name: batch[name] for name in names}
    values = list(_values(batch))
    if len(values) != len(names):
        raise ConfigError(
            f"the loader yielded {len(values)} values, but it is bound to {len(names)} feeds: "
            f"{', '.join(map(repr, names))}"
        )
    return dict(zip(names, values, strict=True))


def _values(batch: Any) -> Iterator[Any]:
    """The tensors and arrays of nested tuples: `(x, y)`, or `((x, weight), y)`."""
    if isinstance(batch, (list, tuple)) and any(map(_holds_values, batch)):
        for part in batch:
            yield from _values(part)
    else:
        yield batch


def _holds_values(part: Any) -> bool:
    return isinstance(part, (Tensor, np.ndarray)) or (
        isinstance(part, (list, tuple)) and any(map(_holds_values, part))
    )


def _program_of(feeds: Sequence[Any]) -> Program:
    """The program of the first variable, or the default main program."""
    variables = [feed for feed in feeds if isinstance(feed, Variable)]
    return program_of(variables[0]) if variables else default_main_program()


def _name(program: Program, feed: Any) -> str:
    if isinstance(feed, str):
        return feed
    if not isinstance(feed, Variable):
        raise ConfigError(
            f"bind: got a {type(feed).__name__} as a feed, expected a variable of static.data or "
            "its name"
        )
    feeds = program.source.recorder.feeds if program.source is not None else {}
    names = [name for name, (_, variable, _) in feeds.items() if variable is feed]
    if not names:
        raise ConfigError(f"bind: {feed!r} is not a feed; bind variables that static.data returned")
    return names[0]
