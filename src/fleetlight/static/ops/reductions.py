# SPDX-License-Identifier: Apache-2.0
"""The two operations that reduce gradients in a program: start an all-reduce, and wait for it.

Both change the bucket in place. The active `Reductions` carry them out, so the graph
is the same on all workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.group import Group
from fleetlight.collective.reduction.reducer import Reducer
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.stamp import GradientStamp
from fleetlight.errors import PlanError

_OPERATION = "all_reduce of the gradients"
#: the parameters of each bucket, by its number
Parts = Mapping[int, tuple[ParameterSlice, ...]]
_NO_PARTS: Parts = {}


class Reductions(Protocol):
    """Computes means over the workers."""

    def begin(self, index: int, bucket: Tensor, inner: int | None) -> None:
        """Start to reduce a bucket, which the program does not use until `end`.

        `inner`: size of an inner group of a hierarchical all-reduce, 0: the workers of a host;
        None: no hierarchy.
        """

    def end(self, index: int, bucket: Tensor) -> None:
        """Wait for the mean; raise a failure."""

    @property
    def workers(self) -> Group:
        """The workers that share the statistics of a norm."""

    @property
    def counts(self) -> bool:
        """Whether this worker's batch counts in statistics."""


class NoReductions:
    """Leaves gradients unreduced, for a worker that trains alone."""

    def __init__(self) -> None:
        self.workers, self.counts = Group(), True

    def begin(self, index: int, bucket: Tensor, inner: int | None) -> None:
        """Do nothing."""

    def end(self, index: int, bucket: Tensor) -> None:
        """Leave the bucket unchanged."""


class GroupReductions:
    """Reduces with the reducers of a group of workers, one for each `inner`.

    `settled` is called with the stamps of the workers when all buckets are reduced, before the
    program uses the last one. `arrived` is called with the means of compressed gradients.
    """

    def __init__(
        self,
        reducers: Mapping[int | None, Reducer],
        group: Group,
        settled: Callable[[Mapping[int, GradientStamp]], None] = lambda stamps: None,
        arrived: Callable[[Mapping[str, Tensor]], None] = lambda means: None,
    ) -> None:
        self._reducers = reducers
        self.workers = self._group = group
        self.counts = True
        self._settled = settled
        self._arrived = arrived
        self._begun: dict[int, tuple[Reducer, Future[Tensor]]] = {}
        #: reducers with stamps to check
        self._used: list[Reducer] = []
        self._parts: Parts = {}

    def prepare(
        self, stamp: GradientStamp, parts: Parts = _NO_PARTS, *, counts: bool = True
    ) -> None:
        """Prepare a run, even after a failed one: set the stamp that the other workers receive.

        `parts`: the parameters in buckets that may be compressed. `counts`: false if the batch
        repeats records of another worker.
        """
        self.counts = counts
        for reducer in self._reducers.values():
            reducer.stamp = stamp
        self._begun.clear()
        self._used.clear()
        self._parts = parts

    def begin(self, index: int, bucket: Tensor, inner: int | None) -> None:
        """Hand the bucket to a reducer, which works in place while the program continues."""
        reducer = self._reducers[inner]
        if reducer not in self._used:
            self._used.append(reducer)
        started = reducer.reduce(Bucket(index, bucket, self._parts.get(index, ())))
        self._begun[index] = reducer, started

    def end(self, index: int, bucket: Tensor) -> None:
        """Wait for the mean; after a failure wait for all buckets, to free the process group."""
        reducer, future = self._begun.pop(index)
        with self._group.named(_OPERATION):
            if not future.done():
                reducer.finish()
            reduced = future.wait()
            if reducer.failures:
                self._fail(reducer.failures[0])
        if reduced.data_ptr() != bucket.data_ptr():
            # a compiler may have moved the bucket
            bucket.copy_(reduced)
        if parts := self._parts.get(index):
            rows = torch.split(bucket, [part.size for part in parts])
            self._arrived({p.name: row for p, row in zip(parts, rows, strict=True)})
        if not self._begun:
            for reducer in self._used:
                self._settled(reducer.stamps())
            self._used.clear()

    def _fail(self, failure: RuntimeError) -> NoReturn:
        for reducer in self._used:
            reducer.finish()
        for _, future in self._begun.values():
            future.wait()
        for reducer in self._used:
            reducer.failures.clear()
        raise failure


_current: ContextVar[Reductions] = ContextVar("reductions")


@contextlib.contextmanager
def reducing(reductions: Reductions) -> Iterator[None]:
    """Inside the block, programs reduce their gradients with `reductions`."""
    token = _current.set(reductions)
    try:
        yield
    finally:
        _current.reset(token)


def reductions() -> Reductions:
    """The reductions of the innermost block."""
    try:
        return _current.get()
    except LookupError:
        raise PlanError(
            "the program reduces gradients over the workers of a job, but there is no job: "
            "run it with static.Executor after fleet.init(), or capture it with an "
            "optimizer without fleet.distributed_optimizer"
        ) from None


def _begin(
    bucket: Tensor,
    index: int,
    after: Tensor | None = None,
    *,
    inner: int | None = None,
    codec: str | None = None,
) -> None:
    reductions().begin(index, bucket, inner)


def _end(bucket: Tensor, index: int, after: Tensor | None = None) -> None:
    reductions().end(index, bucket)


def _nothing(*_: Any, **__: Any) -> None:
    """Both operations on a fake tensor."""


# `after` is the previous bucket: compilers keep only an order that arguments require.
# `inner` is as in `Reductions`; `codec` names the compression of a bucket.
_library: Any = torch.library.Library("fleetlight", "FRAGMENT")  # type: ignore[no-untyped-call]
_ARGUMENTS = "Tensor(a!) bucket, int index, Tensor? after=None"
_library.define(f"reduce({_ARGUMENTS}, *, int? inner=None, str? codec=None) -> ()")
_library.define(f"reduced({_ARGUMENTS}) -> ()")
for _name, _step in (("reduce", _begin), ("reduced", _end)):
    for _backend in ("CPU", "CUDA"):
        _library.impl(_name, _step, _backend)
    _library.impl(_name, _nothing, "Meta")

#: starts to reduce a bucket
REDUCE = torch.ops.fleetlight.reduce.default
#: waits for a bucket
REDUCED = torch.ops.fleetlight.reduced.default
