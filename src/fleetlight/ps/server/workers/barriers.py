# SPDX-License-Identifier: Apache-2.0
"""`Barriers`: the barriers of all workers at one server. Pure.

Each worker counts its barriers; equal counts are one barrier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from numpy.typing import NDArray

from fleetlight.errors import PeerError, ProtocolError
from fleetlight.ps.changes import BarrierPassed
from fleetlight.ps.server.workers.presence import copied_for_thread

Array = NDArray[Any]

T = TypeVar("T")


def _worker(entry: tuple[int, object]) -> int:
    return entry[0]


@dataclasses.dataclass
class _Barrier(Generic[T]):
    operation: str
    #: by worker: the value it sent
    values: dict[int, T] = dataclasses.field(default_factory=dict)


class Barriers(Generic[T]):
    """The workers that have entered each barrier, and their values."""

    def __init__(self, worker_num: int, places: int | None = None) -> None:
        """`places`: how many workers the job may have while it runs."""
        self._places = places or worker_num
        self._open: dict[int, _Barrier[T]] = {}
        #: the last complete barrier; a worker may repeat its request
        self._last: tuple[int, str, list[T]] | None = None
        self._broken: PeerError | None = None
        #: workers that enter no more barriers, and places without a worker
        self._gone: set[int] = set(range(worker_num, self._places))
        self._keeps = places is not None
        #: the barriers before the first lease of a job that workers may join
        self.prelude: list[tuple[int, str, list[T]]] = []
        #: True once a worker has requested a lease
        self.has_begun = False

    def enter(self, worker: int, number: int, operation: str, values: T) -> None:
        """A worker enters a barrier; entering it again has no effect."""
        self._check_open()
        if self._last is not None and number <= self._last[0]:
            self._check_last(worker, number)
            return
        barrier = self._open.setdefault(number, _Barrier(operation))
        if barrier.operation != operation:
            self.give_up(ProtocolError(self._differ(number, barrier, worker, operation)))
        self._check_open()
        barrier.values[worker] = values
        self._complete(number)

    def leave(self, worker: int) -> None:
        """The worker enters no more barriers; this may complete open ones."""
        self._gone.add(worker)
        for number in sorted(self._open):
            self._complete(number)

    def join(self, worker: int) -> None:
        """A worker takes a place, and enters the barriers from now on."""
        self._gone.discard(worker)

    def _complete(self, number: int) -> None:
        if self.missing(number):
            return
        barrier = self._open.pop(number)
        everything = [values for _, values in sorted(barrier.values.items(), key=_worker)]
        self._last = number, barrier.operation, everything
        if self.is_prelude:
            self.prelude.append(self._last)

    @property
    def is_prelude(self) -> bool:
        """True while the results of barriers are kept for workers that join later."""
        return self._keeps and not self.has_begun

    def result(self, number: int) -> list[T] | None:
        """The values of all workers, in order; None while a worker is missing.

        Nothing once a later barrier is complete: the worker has this reply from another connection.
        """
        if self._last is not None and number <= self._last[0]:
            return self._last[2] if number == self._last[0] else []
        self._check_open()
        return None

    @property
    def last(self) -> tuple[int, str, list[T]] | None:
        """The last complete barrier: its number, operation and values."""
        return self._last

    def restore(
        self, number: int, operation: str, values: list[T], *, is_prelude: bool = False
    ) -> None:
        """Restore a barrier that completed in an earlier incarnation."""
        if is_prelude and any(number == known for known, _, _ in self.prelude):
            # a new log file states it again, and a later barrier may be complete
            return
        self._last = number, operation, values
        if is_prelude:
            self.prelude.append(self._last)

    def missing(self, number: int) -> list[int]:
        """Workers that have not entered the barrier."""
        barrier = self._open.get(number)
        entered = barrier.values if barrier is not None else {}
        expected = [w for w in range(self._places) if w not in self._gone]
        return [worker for worker in expected if worker not in entered]

    def give_up(self, error: PeerError) -> None:
        """Fail this and all later barriers with `error`; the first error stays."""
        self._broken = self._broken or error

    def _check_open(self) -> None:
        if self._broken is not None:
            raise copied_for_thread(self._broken)

    def _check_last(self, worker: int, number: int) -> None:
        assert self._last is not None
        if number < self._last[0]:
            raise ProtocolError(
                f"worker {worker} entered barrier {number}, but barrier {self._last[0]} is complete"
            )

    def _differ(self, number: int, barrier: _Barrier[T], worker: int, operation: str) -> str:
        first = min(barrier.values)
        return (
            f"worker {first} waits in {barrier.operation!r}, but worker {worker} entered with "
            f"{operation!r} (barrier {number}); every worker must make the same calls in the "
            "same order"
        )


def barrier_change(
    number: int, operation: str, values: Sequence[Sequence[Array]], *, is_prelude: bool = False
) -> tuple[BarrierPassed, list[Array]]:
    """A complete barrier as a record of the log, with the arrays of each worker."""
    counts = [len(arrays) for arrays in values]
    change = BarrierPassed(number, operation, counts, is_prelude)
    return change, [array for arrays in values for array in arrays]


def by_worker(change: BarrierPassed, arrays: Sequence[Array]) -> list[list[Array]]:
    """The arrays of each worker, copied out of the log's memory."""
    left = iter(arrays)
    return [[next(left).copy() for _ in range(count)] for count in change.counts]
