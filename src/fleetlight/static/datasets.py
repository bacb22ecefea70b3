# SPDX-License-Identifier: Apache-2.0
"""Runs of a program over a whole data set, with a log line every `period` batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from fleetlight.data.read_ahead import ReadAhead
from fleetlight.data.readers.file_stream import FileStream
from fleetlight.errors import ConfigError
from fleetlight.observe.log import logger
from fleetlight.static.loaders import BoundLoader, bind
from fleetlight.static.program import Program

#: runs up to so many batches; returns how many, and the named values of the last one
Run = Callable[[Program, ReadAhead[Any], Sequence[str], int], tuple[int, list[Tensor]]]


@dataclasses.dataclass(frozen=True)
class DatasetResult:
    """The number of steps, and the last fetched values."""

    steps: int
    #: values of the last run that computed them
    fetched: list[Tensor]


@dataclasses.dataclass(frozen=True)
class Fetches:
    """Values computed in the first run and in every `period`-th one, and their log names."""

    names: tuple[str, ...]
    called: Sequence[str] | None
    period: int

    def __post_init__(self) -> None:
        if not isinstance(self.period, int) or self.period < 1:
            raise ConfigError(f"print_period: got {self.period!r}, expected a number of runs")
        if self.called is not None and len(self.called) != len(self.names):
            raise ConfigError(
                f"fetch_info: got {len(self.called)} names, expected one for each of the "
                f"{len(self.names)} in fetch_list"
            )

    def until_next(self, step: int) -> int:
        """How many runs after run number `step` compute values next; the first run is 1."""
        return 1 if step == 0 else self.period - step % self.period

    def described(self, values: Sequence[Tensor]) -> str:
        """Names and values, for the log."""
        names = self.called or self.names
        return ", ".join(f"{n} {_shown(v)}" for n, v in zip(names, values, strict=True))


#: Fleet's arguments without effect here, and why
_EXPLAINED = {
    "scope": "values are in the model and the optimizer, so there is no scope to choose",
    "thread": "a worker runs its batches one after another; start more workers "
    "(fleetrun --nproc_per_node or --worker_num) for more at once",
    "debug": "there is no per-operator timing; use torch.profiler around the call, and "
    "fleet.account() for the time spent waiting",
}


def explain(verb: str, **given: object) -> None:
    """Log a line for each argument that is set and has no effect."""
    for name, value in given.items():
        if value:
            logger.info("%s: %s=%r has no effect: %s", verb, name, value, _EXPLAINED[name])


def train(run: Run, program: Program, dataset: Any, fetches: Fetches) -> DatasetResult:
    """Make a step for each batch."""
    return _run(run, program, _bound(dataset, program), fetches, "train")


def infer(run: Run, program: Program, dataset: Any, fetches: Fetches) -> DatasetResult:
    """Run an evaluation for each batch."""
    if program.form.trains:
        raise ConfigError(
            "infer_from_dataset: got a program that trains; give program.clone(for_test=True)"
        )
    return _run(run, program, _bound(dataset, program), fetches, "infer")


def _run(
    run: Run, program: Program, loader: BoundLoader, fetches: Fetches, verb: str
) -> DatasetResult:
    batches, step, fetched = ReadAhead(iter(loader)), 0, list[Tensor]()
    while True:
        count = fetches.until_next(step)
        made, values = run(program, batches, fetches.names, count)
        step += made
        if made < count:
            break
        if fetches.names:
            fetched = values
            logger.info("%s: step %d, %s", verb, step, fetches.described(values))
    logger.info("%s: %d steps", verb, step)
    return DatasetResult(step, fetched)


def _bound(dataset: Any, program: Program) -> BoundLoader:
    if isinstance(dataset, BoundLoader):
        return dataset
    if isinstance(dataset, FileStream):
        raise ConfigError(
            "a FileStream gives lines; give its loader, stream.loader(batch_size), or "
            "fleet.shard(stream.loader(batch_size))"
        )
    if not isinstance(dataset, Iterable):
        raise ConfigError(
            f"dataset: got a {type(dataset).__name__}, expected a loader of batches, or a "
            "loader from static.bind"
        )
    return bind(dataset, None, program)


def _shown(value: Tensor) -> str:
    return f"{value.item():.6g}" if value.numel() == 1 else str(value.tolist())
