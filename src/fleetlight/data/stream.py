# SPDX-License-Identifier: Apache-2.0
"""Streams of records, dealt out block by block."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from fleetlight.data.chance import Chance
from fleetlight.data.order import Blocks
from fleetlight.data.sampling import epoch_seed


class SharedBatch(NamedTuple):
    """A batch on its way from a loading process, with what it counts."""

    batch: Any
    mine: int
    total: int
    #: the loading process it comes from
    process: int
    #: records taken from the stream for it; 0: no batch, the process only lets its turn pass
    taken: int


class ShardedStream(IterableDataset[SharedBatch]):
    """Reads the whole stream and keeps one worker's part of each block.

    Every worker sees the same stream, so all of them cut the same blocks: chance in it starts
    from the job's seed. In a loading process it works on what the stream yields there; torch
    takes turns between those processes in the same order on every worker.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        blocks: Blocks,
        worker: int,
        collate: Callable[[list[Any]], Any],
        processes: int,
    ) -> None:
        self._dataset = dataset
        self._blocks = blocks
        self._worker = worker
        self._collate = collate
        # epoch, seed, turn, records taken; shared, because loading processes may outlive an epoch
        self._start = torch.zeros(3 + processes, dtype=torch.int64)
        self._start.share_memory_()  # type: ignore[no-untyped-call]

    def start_at(self, epoch: int, seed: int, turn: int, taken: Sequence[int]) -> None:
        """Where the next iteration starts, in each loading process."""
        self._start.copy_(torch.tensor([epoch, epoch_seed(seed, epoch), turn, *taken]))

    def __iter__(self) -> Iterator[SharedBatch]:
        info = get_worker_info()
        process = 0 if info is None else info.id
        epoch, seed, turn, *taken = self._start.tolist()
        if process < turn:
            # torch begins with process 0, but it has had this turn before
            yield SharedBatch(None, 0, 0, process, 0)
        chance = Chance((seed + process) % 2**63)
        with chance:
            first, records = self._open(epoch, taken[process])
        size = self._blocks.block
        while True:
            with chance:
                block = list(itertools.islice(records, size))
            if len(block) == size or (block and self._blocks.tail != "drop"):
                yield self._part_of(block, first, process)
            if len(block) < size:
                return

    def _open(self, epoch: int, taken: int) -> tuple[list[Any], Iterator[Any]]:
        """The records behind the first `taken` of them, and those that padding goes on with."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        records = iter(self._dataset)
        reserve = self._blocks.block if self._blocks.tail == "pad" else 0
        first = list(itertools.islice(records, reserve))
        records = itertools.chain(first, records)
        collections.deque(itertools.islice(records, taken), maxlen=0)
        return first, records

    def _part_of(self, block: list[Any], first: list[Any], process: int) -> SharedBatch:
        cut = Blocks(len(block), self._blocks.batch, self._blocks.workers, self._blocks.tail)
        part = cut.part(0, self._worker)
        missing = max(0, part.stop - len(block))
        filled = block + list(itertools.islice(itertools.cycle(first), missing))
        batch = self._collate(filled[part.start : part.stop])
        return SharedBatch(batch, part.mine, part.total, process, len(block))
