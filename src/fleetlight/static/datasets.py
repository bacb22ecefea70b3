# SPDX-License-Identifier: Apache-2.0
"""Whole data sets through a program, batch by batch, with a line in the log now and then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from fleetlight.data.readers.file_stream import FileStream
from fleetlight.errors import ConfigError
from fleetlight.observe.log import logger
from fleetlight.static.loaders import BoundLoader, bind
from fleetlight.static.program import Program

#: `Executor.run`
Run = Callable[..., list[Any]]


@dataclasses.dataclass(frozen=True)
class DatasetResult:
    """What came of a data set."""

    steps: int
    #: of the last run that computed them
    fetched: list[Tensor]


@dataclasses.dataclass(frozen=True)
class Fetches:
    """What is computed at the first run and at every `period`-th one, and how it is called."""

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

    def of(self, step: int) -> tuple[str, ...]:
        """What the run of this number computes, the first being 1."""
        return self.names if step == 1 or step % self.period == 0 else ()

    def told(self, values: Sequence[Tensor]) -> str:
        """Names and values, for the log."""
        names = self.called or self.names
        return ", ".join(f"{n} {_shown(v)}" for n, v in zip(names, values, strict=True))


#: Fleet's arguments that change nothing here, and why
_EXPLAINED = {
    "scope": "values live in the model and the optimizer, so there is no scope to choose",
    "thread": "a worker runs its batches one after another; start more workers "
    "(fleetrun --nproc_per_node or --worker_num) for more at once",
    "debug": "there is no per-operator timing; use torch.profiler around the call, and "
    "fleet.account() for the time spent waiting",
}


def explain(verb: str, **given: object) -> None:
    """Log a line for each argument that is set and changes nothing."""
    for name, value in given.items():
        if value:
            logger.info("%s: %s=%r changes nothing: %s", verb, name, value, _EXPLAINED[name])


def train(run: Run, program: Program, dataset: Any, fetches: Fetches) -> DatasetResult:
    """A step for each batch."""
    return _run(run, program, _bound(dataset, program), fetches, "train")


def infer(run: Run, program: Program, dataset: Any, fetches: Fetches) -> DatasetResult:
    """A run for each batch of a program that changes nothing."""
    if program.form.trains:
        raise ConfigError(
            "infer_from_dataset: got a program that trains; give program.clone(for_test=True)"
        )
    return _run(run, program, _bound(dataset, program), fetches, "infer")


def _run(
    run: Run, program: Program, loader: BoundLoader, fetches: Fetches, verb: str
) -> DatasetResult:
    step, fetched = 0, []
    for step, batch in enumerate(loader, 1):
        names = fetches.of(step)
        values = run(program, feed=batch, fetch_list=names)
        if names:
            fetched = values
            logger.info("%s: step %d, %s", verb, step, fetches.told(values))
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
            f"dataset: got a {type(dataset).__name__}, expected a loader of batches, or one that "
            "static.bind answered"
        )
    return bind(dataset, None, program)


def _shown(value: Tensor) -> str:
    return f"{value.item():.6g}" if value.numel() == 1 else str(value.tolist())
