# SPDX-License-Identifier: Apache-2.0
"""The two operations by which a program reduces gradients: begin with a bucket, and have it back.

Both change the bucket where it is. What they do is the business of the `Reductions` in whose block
the program runs; the graph has no word of it, and is the same on all workers.
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
#: of buckets by their numbers
Parts = Mapping[int, tuple[ParameterSlice, ...]]
_NO_PARTS: Parts = {}


class Reductions(Protocol):
    """Who takes means over the workers."""

    def begin(self, index: int, bucket: Tensor, inner: int | None) -> None:
        """Start with a bucket, which nobody touches until it is back.

        By levels, if `inner` says so: how many workers form an inner group, 0: those of a host.
        """

    def end(self, index: int, bucket: Tensor) -> None:
        """Wait until it is back; a failure is raised."""

    @property
    def workers(self) -> Group:
        """Those whose batches are one for a norm."""

    @property
    def counts(self) -> bool:
        """Whether the records of this worker's batch count."""


class NoReductions:
    """Gradients stay this worker's own."""

    def __init__(self) -> None:
        self.workers, self.counts = Group(), True

    def begin(self, index: int, bucket: Tensor, inner: int | None) -> None:
        """Nobody else is asked."""

    def end(self, index: int, bucket: Tensor) -> None:
        """It is as it was."""


class GroupReductions:
    """Carried out by reducers of a group of workers, one for each `inner` that is asked for.

    `settled` is called with the stamps of the workers when all that was begun is back: before
    anything is done with the last bucket. `arrived` is called with what has travelled coded.
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
        #: whose stamps are to be looked at
        self._used: list[Reducer] = []
        self._parts: Parts = {}

    def prepare(
        self, stamp: GradientStamp, parts: Parts = _NO_PARTS, *, counts: bool = True
    ) -> None:
        """Before a run: what the others are told of this worker. The last one may have failed.

        `parts`: whose gradients the buckets have that may travel in another form. `counts`: its
        batch is no repetition of records that another worker has.
        """
        self.counts = counts
        for reducer in self._reducers.values():
            reducer.stamp = stamp
        self._begun.clear()
        self._used.clear()
        self._parts = parts

    def begin(self, index: int, bucket: Tensor, inner: int | None) -> None:
        """Hand it to a reducer, which works in place while the program goes on."""
        reducer = self._reducers[inner]
        if reducer not in self._used:
            self._used.append(reducer)
        started = reducer.reduce(Bucket(index, bucket, self._parts.get(index, ())))
        self._begun[index] = reducer, started

    def end(self, index: int, bucket: Tensor) -> None:
        """Wait for it; after a failure for all others too, which would hold the process group."""
        reducer, future = self._begun.pop(index)
        with self._group.named(_OPERATION):
            if not future.done():
                reducer.finish()
            reduced = future.wait()
            if reducer.failures:
                self._fail(reducer.failures[0])
        if reduced.data_ptr() != bucket.data_ptr():
            # a compiler has put it somewhere else since
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
    """Inside the block, programs reduce their gradients by these."""
    token = _current.set(reductions)
    try:
        yield
    finally:
        _current.reset(token)


def reductions() -> Reductions:
    """Those of the innermost block."""
    try:
        return _current.get()
    except LookupError:
        raise PlanError(
            "the program takes means over the workers of a job, and nobody "
            "here does that: run it by static.Executor after fleet.init(), or capture it with an "
            "optimizer that is not one of fleet.distributed_optimizer"
        ) from None


def _begin(
    bucket: Tensor,
    index: int,
    behind: Tensor | None = None,
    *,
    inner: int | None = None,
    codec: str | None = None,
) -> None:
    reductions().begin(index, bucket, inner)


def _end(bucket: Tensor, index: int, behind: Tensor | None = None) -> None:
    reductions().end(index, bucket)


def _nothing(*_: Any, **__: Any) -> None:
    """What either does to a tensor without values."""


# `behind` is a bucket whose turn is before: compilers keep only orders that they see a need for.
# `inner` asks for levels, as in `Reductions`; `codec` is the form in which a bucket may travel.
_library: Any = torch.library.Library("fleetlight", "FRAGMENT")  # type: ignore[no-untyped-call]
_ARGUMENTS = "Tensor(a!) bucket, int index, Tensor? behind=None"
_library.define(f"reduce({_ARGUMENTS}, *, int? inner=None, str? codec=None) -> ()")
_library.define(f"reduced({_ARGUMENTS}) -> ()")
for _name, _step in (("reduce", _begin), ("reduced", _end)):
    for _backend in ("CPU", "CUDA"):
        _library.impl(_name, _step, _backend)
    _library.impl(_name, _nothing, "Meta")

#: a bucket begins to be reduced
REDUCE = torch.ops.fleetlight.reduce.default
#: it is back
REDUCED = torch.ops.fleetlight.reduced.default
