# SPDX-License-Identifier: Apache-2.0
"""`fleet.run_steps`: several steps of an eager loop in one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fleetlight.errors import ConfigError, names_arguments
from fleetlight.fleet.job import Job, current

if TYPE_CHECKING:
    from fleetlight.data.read_ahead import ReadAhead

B = TypeVar("B")


class StepsRun(NamedTuple):
    """What the last step returned (None: there was none), and how many steps were made."""

    result: Any
    steps: int


@names_arguments
def run_steps(
    step: Callable[[B], object], batches: Iterable[B], steps: int | None = None
) -> StepsRun:
    """Call `step(batch)` for up to `steps` batches of an iterator, which the next call continues.

    With parameter servers (sync or async), it reads plain loaders one or two batches ahead and
    announces their ids, as `fleet.shard` does.

    Args:
        step: makes one training step with a batch.
        batches: an iterator, or without `steps` any loader.
        steps: the most steps; None for all batches.

    Returns:
        `(result, steps)`: what the last step returned, and how many steps were made.

    Raises:
        ConfigError: `steps` is no number of steps, or `batches` is no iterator.

    Example:
        >>> fleet.init(is_collective=True)
        >>> batches = iter([1.0, 2.0, 3.0])
        >>> fleet.run_steps(lambda batch: batch * 10, batches, steps=2)
        StepsRun(result=20.0, steps=2)
    """
    # jobs that run their own loop do not wait for the readers of data
    from fleetlight.data.read_ahead import ReadAhead

    job = current()
    early = ReadAhead(_limited(batches, steps))
    made, result = 0, None
    for batch in _announced(job, early):
        result, made = step(batch), made + 1
    return StepsRun(result, made)


def _limited(batches: Iterable[B], steps: int | None) -> Iterator[B]:
    if steps is None:
        return iter(batches)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"run_steps: got {steps=!r}, expected a number of steps, or None")
    if not isinstance(batches, Iterator):
        raise ConfigError(
            f"run_steps: got {steps=} and a {type(batches).__name__}, expected an iterator: a "
            "loader would restart in each call; give iter(loader), and keep it"
        )
    return itertools.islice(batches, steps)


def _announced(job: Job, batches: ReadAhead[B]) -> Iterator[B]:
    """The batches; those after each one are announced first."""
    if job.step_hints is None:
        job.step_hints = job.prefetch_hints(None)
    hints = job.step_hints
    # the first batch shows whether a loader of `fleet.shard` is behind the iterator
    while batches.peek(1):
        ahead = 0 if hints is None or job.reads_shards else hints.batches_ahead()
        if hints is not None and ahead:
            hints.announce(batches.peek(1 + ahead))
        yield next(batches)
    # an error of the batch after those loaded
    yield from batches
