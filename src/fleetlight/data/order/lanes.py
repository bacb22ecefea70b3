# SPDX-License-Identifier: Apache-2.0
"""`Lanes`: equal steps for all workers, each of which reads windows of its own. Pure.

A step takes a batch from the lane of each worker. A lane with too few records for a batch takes the
next window. Once none is left for a lane, the records left in all lanes become the tail, which is
dealt out in blocks (`Blocks`). So workers read the same windows only at the end of an epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fleetlight.data.order.blocks import Blocks, Interval


class LanePart(NamedTuple):
    """The part of one worker in a step: its positions, and how many samples count."""

    intervals: tuple[Interval, ...]
    mine: int
    total: int


class Lanes:
    """The rest of an epoch: pieces of windows, of which each worker takes some."""

    def __init__(self, pieces: Sequence[Interval], batch: int, workers: int, tail: str) -> None:
        """Deal out pieces, in this order; each is a part of one window."""
        self._batch, self._workers, self._tail = batch, workers, tail
        self._next = deque(pieces)
        self._lanes = [_Lane() for _ in range(workers)]

    def parts(self, worker: int) -> Iterator[LanePart]:
        """The parts of one worker, to the end of the epoch."""
        whole = self._batch * self._workers
        while steps := self._refill():
            for _ in range(steps):
                taken = self._lanes[worker].take(self._batch)
                yield LanePart(tuple(taken), self._batch, whole)
            self._advance(steps, but=worker)
        rest = self.left()
        blocks = Blocks(_count(rest), self._batch, self._workers, self._tail)
        for part in blocks.parts(worker):
            yield LanePart(tuple(_within(rest, part.start, part.stop)), part.mine, part.total)

    def skip(self, steps: int) -> None:
        """Leave out the next steps of all workers."""
        while steps and (full := min(steps, self._refill())):
            self._advance(full)
            steps -= full
        if steps:
            rest, gone = self.left(), steps * self._batch * self._workers
            self._lanes = [_Lane() for _ in range(self._workers)]
            self._next = deque(_within(rest, gone, max(gone, _count(rest))))

    def left(self) -> list[Interval]:
        """All that is left, with the pieces that lanes have begun in front."""
        return [piece for lane in self._lanes for piece in lane.pieces] + list(self._next)

    def _refill(self) -> int:
        """Give lanes what they need for a step; returns how many full steps follow."""
        for lane in self._lanes:
            while lane.length < self._batch and self._next:
                lane.add(self._next.popleft())
        return min(lane.length for lane in self._lanes) // self._batch

    def _advance(self, steps: int, but: int | None = None) -> None:
        for number, lane in enumerate(self._lanes):
            if number != but:
                lane.take(steps * self._batch)


class _Lane:
    """The pieces of one worker."""

    def __init__(self) -> None:
        self.pieces: deque[Interval] = deque()
        self.length = 0

    def add(self, piece: Interval) -> None:
        self.pieces.append(piece)
        self.length += piece[1] - piece[0]

    def take(self, count: int) -> list[Interval]:
        """Remove so many records from the front."""
        self.length -= count
        taken = []
        while count:
            start, stop = self.pieces.popleft()
            end = min(stop, start + count)
            taken.append((start, end))
            if end < stop:
                self.pieces.appendleft((end, stop))
            count -= end - start
        return taken


def _within(pieces: Sequence[Interval], start: int, stop: int) -> list[Interval]:
    """The records `start` to `stop` of pieces put together; past the end they repeat."""
    found: list[Interval] = []
    length = _count(pieces)
    while start < stop:
        at = start % length
        for low, high in pieces:
            if at < high - low:
                end = min(high, low + at + stop - start)
                found.append((low + at, end))
                start += end - low - at
                break
            at -= high - low
    return found


def _count(pieces: Sequence[Interval]) -> int:
    return sum(stop - start for start, stop in pieces)
