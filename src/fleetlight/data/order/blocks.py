# SPDX-License-Identifier: Apache-2.0
"""Which record is whose: a pure function of seed, epoch, worker and number of workers.

An epoch is one order of all records. At step i the workers together hold block i of it, the
batch that one process with N times the batch size would have had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from fleetlight.errors import ConfigError

TAILS = ("join", "drop", "pad")
#: positions in an epoch's order: from the first up to, and without, the second
Interval = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class BlockPart:
    """One worker's part of a block: which positions of the epoch, and how many of them count."""

    start: int
    stop: int
    #: how many of these samples count: none in a filler, where the records ran out
    mine: int
    #: how many samples of the whole block count
    total: int


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How an epoch of `length` positions is cut into blocks and each block into parts."""

    length: int
    batch: int
    workers: int
    tail: str = "join"

    def __post_init__(self) -> None:
        if self.tail not in TAILS:
            known = ", ".join(TAILS)
            raise ConfigError(f"fleet.shard: tail={self.tail!r}, expected one of {known}")

    @property
    def block(self) -> int:
        """Samples that one step uses."""
        return self.batch * self.workers

    def steps(self, consumed: int = 0) -> int:
        """Steps that remain after `consumed` samples of the epoch."""
        left = max(0, self.length - consumed)
        return left // self.block if self.tail == "drop" else -(-left // self.block)

    def part(self, start: int, worker: int) -> BlockPart:
        """The part of one worker in the block that starts at position `start`."""
        total = min(self.block, self.length - start)
        if total == self.block:
            first = start + worker * self.batch
            return BlockPart(first, first + self.batch, self.batch, total)
        if self.tail == "pad":
            return self._padded(start, worker)
        return self._joined(start, total, worker)

    def parts(self, worker: int, consumed: int = 0) -> Iterator[BlockPart]:
        """One worker's parts of the rest of an epoch."""
        for step in range(self.steps(consumed)):
            yield self.part(consumed + step * self.block, worker)

    def _joined(self, start: int, total: int, worker: int) -> BlockPart:
        """The last, short block in nearly equal shares. A worker left without one repeats a
        record that does not count: it must take part in the step, yet change nothing."""
        share, extra = divmod(total, self.workers)
        mine = share + (worker < extra)
        first = start + worker * share + min(worker, extra)
        if mine == 0:
            return BlockPart(start, start + 1, 0, total)
        return BlockPart(first, first + mine, mine, total)

    def _padded(self, start: int, worker: int) -> BlockPart:
        """The last block filled up with records from the beginning of the epoch."""
        first = start + worker * self.batch
        return BlockPart(first, first + self.batch, self.batch, self.block)


def padded(order: Sequence[int], part: BlockPart) -> list[int]:
    """The records of a part; positions past the end start over."""
    if part.stop <= len(order):
        return list(order[part.start : part.stop])
    return [order[position % len(order)] for position in range(part.start, part.stop)]
