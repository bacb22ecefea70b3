# SPDX-License-Identifier: Apache-2.0
"""Sources of records by number: single records, or the batches of a batch sampler."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from fleetlight.data.order.blocks import BlockPart, Blocks, padded
from fleetlight.data.sources.sampler import ShardBatches, SharedSampler
from fleetlight.data.sources.source import Dealt, RecordSource, Shard


class IndexedSource(RecordSource):
    """The entries of a sampler, in blocks; a batch sampler of ours tells torch which to load."""

    def __init__(self, sampler: Any, shard: Shard) -> None:
        self._sampler = SharedSampler(sampler, shard.workers)
        self._shard = shard
        self._consumed = 0
        self._order: Sequence[Any] = ()
        self._batches = ShardBatches()

    @abc.abstractmethod
    def blocks(self, length: int) -> Blocks:
        """The blocks of an epoch of `length` entries."""

    @abc.abstractmethod
    def batch(self, order: Sequence[Any], part: BlockPart) -> list[int]:
        """The records of a part."""

    @abc.abstractmethod
    def counts(self, order: Sequence[Any], blocks: Blocks, start: int) -> tuple[int, int]:
        """Samples that count in the block at `start`: of this worker, of all workers."""

    def arguments(self) -> dict[str, Any]:
        return {"batch_sampler": self._batches}

    def steps(self) -> int:
        return self.blocks(len(self._sampler)).steps()

    @property
    def order_name(self) -> str:
        return self._sampler.order_name

    def settings(self) -> dict[str, object]:
        return self._sampler.settings()

    @property
    def position(self) -> dict[str, Any]:
        return {"consumed": self._consumed}

    @position.setter
    def position(self, position: Mapping[str, Any]) -> None:
        self._consumed = int(position.get("consumed", 0))

    def is_at_end(self, position: Mapping[str, Any]) -> bool:
        consumed = int(position["consumed"])
        blocks = self.blocks(len(self._sampler))
        return consumed > 0 and blocks.steps(consumed) == 0

    def begin(self, epoch: int, seed: int) -> None:
        order = self._order = self._sampler.order(seed, epoch)
        parts = self._blocks.parts(self._shard.worker, self._consumed)
        self._batches.now = (self.batch(order, part) for part in parts)

    def counted(self, loaded: Iterator[Any]) -> Iterator[Dealt]:
        order, blocks = self._order, self._blocks
        for batch in loaded:
            counts = self.counts(order, blocks, self._consumed)
            self._consumed += blocks.block
            yield (batch, *counts)

    def records_after(self, position: Mapping[str, Any]) -> Sequence[Any]:
        part = self._blocks.part(int(position["consumed"]), self._shard.worker)
        return self.batch(self._order, part)

    @property
    def _blocks(self) -> Blocks:
        return self.blocks(len(self._order))


class MapSource(IndexedSource):
    """Records by number, `batch_size` of them for each worker."""

    def __init__(self, loader: DataLoader[Any], shard: Shard) -> None:
        super().__init__(loader.sampler, shard)
        self._size = loader.batch_size or 1
        self._drop = loader.drop_last

    def settings(self) -> dict[str, object]:
        return {**super().settings(), "drop_last": self._drop}

    def blocks(self, length: int) -> Blocks:
        return self._shard.cut(length, self._size, drop=self._drop)

    def batch(self, order: Sequence[Any], part: BlockPart) -> list[int]:
        return padded(order, part)

    def counts(self, order: Sequence[Any], blocks: Blocks, start: int) -> tuple[int, int]:
        part = blocks.part(start, self._shard.worker)
        return part.mine, part.total


class BatchSource(IndexedSource):
    """The batches of the user's batch sampler, whole, in turn."""

    def blocks(self, length: int) -> Blocks:
        return self._shard.cut(length, 1)

    def batch(self, order: Sequence[Any], part: BlockPart) -> list[int]:
        return list(order[part.start % len(order)])

    def counts(self, order: Sequence[Any], blocks: Blocks, start: int) -> tuple[int, int]:
        parts = [blocks.part(start, worker) for worker in range(blocks.workers)]
        sizes = [len(self.batch(order, part)) if part.mine else 0 for part in parts]
        return sizes[self._shard.worker], sum(sizes)
