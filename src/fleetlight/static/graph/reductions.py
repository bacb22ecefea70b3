# SPDX-License-Identifier: Apache-2.0
"""The two operations by which a program reduces gradients: begin with a bucket, and have it back.

Both change the bucket where it is. What they do is the business of the `Reductions` in whose block
the program runs; the graph has no word of it, and is the same on all workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future

from fleetlight.collective.group import Group
from fleetlight.collective.position import Stamp
from fleetlight.collective.reducer import Reducer
from fleetlight.collective.routes.route import Bucket
from fleetlight.errors import PlanError

_OPERATION = "all_reduce of the gradients"


class Reductions(Protocol):
    """Who takes means over the workers."""

    def begin(self, index: int, bucket: Tensor) -> None:
        """Start with a bucket, which nobody touches until it is back."""

    def end(self, index: int, bucket: Tensor) -> None:
        """Wait until it is back; a failure is raised."""


class GroupReductions:
    """Carried out by the reducer of a group of workers.

    `settled` is called with the stamps of the workers when all that was begun is back: before
    anything is done with the last bucket.
    """

    def __init__(
        self,
        reducer: Reducer,
        group: Group,
        settled: Callable[[Mapping[int, Stamp]], None] = lambda stamps: None,
    ) -> None:
        self._reducer = reducer
        self._group = group
        self._settled = settled
        self._begun: dict[int, Future[Tensor]] = {}

    def prepare(self, stamp: Stamp) -> None:
        """Before a run: what the others are told of this worker. The last one may have failed."""
        self._reducer.stamp = stamp
        self._begun.clear()

    def begin(self, index: int, bucket: Tensor) -> None:
        """Hand it to the reducer, which works in place while the program goes on."""
        self._begun[index] = self._reducer.reduce(Bucket(index, bucket))

    def end(self, index: int, bucket: Tensor) -> None:
        """Wait for it; after a failure for all others too, which would hold the process group."""
        future = self._begun.pop(index)
        with self._group.named(_OPERATION):
            if not future.done():
                self._reducer.finish()
            reduced = future.wait()
            if self._reducer.failures:
                self._fail()
        if reduced.data_ptr() != bucket.data_ptr():
            # a compiler has put it somewhere else since
            bucket.copy_(reduced)
        if not self._begun:
            self._settled(self._reducer.stamps())

    def _fail(self) -> None:
        self._reducer.finish()
        for future in self._begun.values():
            future.wait()
        failure = self._reducer.failures[0]
        self._reducer.failures.clear()
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


def _reductions() -> Reductions:
    try:
        return _current.get()
    except LookupError:
        raise PlanError(
            "the program takes the means of its gradients over the workers of a job, and nobody "
            "here does that: run it by static.Executor after fleet.init(), or capture it with an "
            "optimizer that is not one of fleet.distributed_optimizer"
        ) from None


def _begin(bucket: Tensor, index: int, behind: Tensor | None = None) -> None:
    _reductions().begin(index, bucket)


def _end(bucket: Tensor, index: int, behind: Tensor | None = None) -> None:
    _reductions().end(index, bucket)


def _nothing(bucket: Tensor, index: int, behind: Tensor | None = None) -> None:
    """What either does to a tensor without values."""


_library: Any = torch.library.Library("fleetlight", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _step in (("reduce", _begin), ("reduced", _end)):
    # `behind` is a bucket whose turn is before: compilers keep only orders that they see a need for
    _library.define(f"{_name}(Tensor(a!) bucket, int index, Tensor? behind=None) -> ()")
    for _backend in ("CPU", "CUDA"):
        _library.impl(_name, _step, _backend)
    _library.impl(_name, _nothing, "Meta")

#: a bucket begins to be reduced
REDUCE = torch.ops.fleetlight.reduce.default
#: it is back
REDUCED = torch.ops.fleetlight.reduced.default
