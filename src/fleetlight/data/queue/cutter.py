# SPDX-License-Identifier: Apache-2.0
"""`RangeCutter`: cuts ranges into batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fleetlight.data.order.blocks import Interval


class RangeBatch(NamedTuple):
    """A batch of a range: the range's number, the batch's positions, the range's end."""

    number: int
    start: int
    stop: int
    end: int


class RangeCutter(Iterator[list[Any]]):
    """The batches that torch loads next, perhaps of later ranges than those handed out.

    It requests the next range when it has cut up the last one. While no range is free it ends,
    however often torch asks.
    """

    def __init__(
        self,
        unit: int,
        by_record: bool,
        next_range: Callable[[int], Interval | None],
        announce: Callable[[RangeBatch], None],
    ) -> None:
        """Calls `announce` before the records of a batch are read."""
        self._unit, self._by_record, self._next_range = unit, by_record, next_range
        self._announce = announce
        self._order: Sequence[Any] = ()
        self._last = RangeBatch(-1, 0, 0, 0)
        #: batches that torch has taken and not loaded yet
        self._taken: deque[RangeBatch] = deque()
        self._has_ended = False

    def restart(self, order: Sequence[Any], last: RangeBatch) -> None:
        """Continue after a batch, in this order of the epoch."""
        self._order, self._last, self._has_ended = order, last, False
        self._taken.clear()

    def __next__(self) -> list[Any]:
        number, _, start, end = self._last
        if start >= end:
            number += 1
            start, end = self._request(number)
        stop = min(start + self._unit, end)
        self._last = RangeBatch(number, start, stop, end)
        self._taken.append(self._last)
        self._announce(self._last)
        return self.records(start, stop)

    def loaded(self) -> tuple[RangeBatch, int]:
        """The batch that torch has loaded next, and how many samples it has."""
        batch = self._taken.popleft()
        samples = batch.stop - batch.start if self._by_record else len(self._order[batch.start])
        return batch, samples

    def records(self, start: int, end: int) -> list[Any]:
        """The records of the batch that starts there, of a range that ends there."""
        stop = min(start + self._unit, end)
        if not self._by_record:
            return list(self._order[start])
        return list(self._order[start:stop])

    def _request(self, number: int) -> Interval:
        dealt = None if self._has_ended else self._next_range(number)
        if dealt is None:
            self._has_ended = True
            raise StopIteration
        return dealt
