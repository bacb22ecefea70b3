# SPDX-License-Identifier: Apache-2.0
"""Which records each worker reads: a pure function of the order and the number of workers.

An epoch is one order of all records. At step i the workers together read block i of it: the batch
of one process with N times the batch size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from fleetlight.errors import ConfigError

TAILS = ("join", "drop", "pad")
#: positions in an epoch's order, [start, stop)
Interval = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class BlockPart:
    """One worker's part of a block: its positions in the epoch, and how many of them count."""

    start: int
    stop: int
    #: samples of the part that count; 0 in a filler, for which no record was left
    mine: int
    #: samples of the whole block that count
    total: int


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Cuts an epoch of `length` positions into blocks, and each block into parts."""

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
        """Samples in one step of all workers."""
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
        """The last, short block in nearly equal shares.

        A worker without a record repeats one that does not count: it takes part in the step and
        changes nothing.
        """
        share, extra = divmod(total, self.workers)
        mine = share + (worker < extra)
        first = start + worker * share + min(worker, extra)
        if mine == 0:
            return BlockPart(start, start + 1, 0, total)
        return BlockPart(first, first + mine, mine, total)

    def _padded(self, start: int, worker: int) -> BlockPart:
        """The last block, filled up with records from the start of the epoch."""
        first = start + worker * self.batch
        return BlockPart(first, first + self.batch, self.batch, self.block)


def padded(order: Sequence[int], part: BlockPart) -> list[int]:
    """The records of a part; positions past the end wrap around."""
    if part.stop <= len(order):
        return list(order[part.start : part.stop])
    return [order[position % len(order)] for position in range(part.start, part.stop)]
