# SPDX-License-Identifier: Apache-2.0
"""Sources of records with numbers: by record, or by the batches of a batch sampler."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, Sampler

from fleetlight.data.order.blocks import BlockPart, Blocks, padded
from fleetlight.data.order.epoch_order import order_of
from fleetlight.data.sources.source import Dealt, RecordSource, Shard, length_of
from fleetlight.observe.log import logger


class IndexedSource(RecordSource):
    """What a sampler yields, in blocks; our own batch sampler tells torch which."""

    def __init__(self, sampler: Any, share: Shard) -> None:
        self._sampler = sampler
        self._share = share
        self._consumed = 0
        self._order: Sequence[Any] = ()
        self._is_checked = share.workers == 1
        self._batches = ShardBatches()

    @abc.abstractmethod
    def blocks(self, length: int) -> Blocks:
        """How an epoch of `length` entries is cut."""

    @abc.abstractmethod
    def batch(self, order: Sequence[Any], part: BlockPart) -> list[int]:
        """The records of a part."""

    @abc.abstractmethod
    def counts(self, order: Sequence[Any], blocks: Blocks, start: int) -> tuple[int, int]:
        """Samples that count in the block at `start`: of this worker, of all."""

    def arguments(self) -> dict[str, Any]:
        return {"batch_sampler": self._batches}

    def steps(self) -> int:
        return self.blocks(len(self._sampler)).steps()

    def settings(self) -> dict[str, object]:
        return {"records": length_of(self._sampler), "sampler": type(self._sampler).__name__}

    def is_at_end(self, position: Mapping[str, Any]) -> bool:
        consumed = int(position["consumed"])
        blocks = self.blocks(len(self._sampler))
        return consumed > 0 and blocks.steps(consumed) == 0

    def begin(self, epoch: int, seed: int) -> None:
        self._order = order_of(self._sampler, seed, epoch)
        if not self._is_checked:
            self._is_checked = True
            check_repeats(self._sampler, self._order, seed, epoch)
        order, parts = self._order, self._blocks.parts(self._share.worker, self._consumed)
        self._batches.now = (self.batch(order, part) for part in parts)

    def deal(self, loaded: Iterator[Any]) -> Iterator[Dealt]:
        order, blocks = self._order, self._blocks
        for batch in loaded:
            counts = self.counts(order, blocks, self._consumed)
            self._consumed += blocks.block
            yield (batch, *counts)

    def records_behind(self, position: Mapping[str, Any]) -> Sequence[Any]:
        part = self._blocks.part(int(position["consumed"]), self._share.worker)
        return self.batch(self._order, part)

    @property
    def position(self) -> dict[str, Any]:
        return {"consumed": self._consumed}

    @position.setter
    def position(self, position: Mapping[str, Any]) -> None:
        self._consumed = int(position.get("consumed", 0))

    @property
    def _blocks(self) -> Blocks:
        return self.blocks(len(self._order))


class MapSource(IndexedSource):
    """Records by index, `batch_size` of them for each worker."""

    def __init__(self, loader: DataLoader[Any], share: Shard) -> None:
        super().__init__(loader.sampler, share)
        self._size = loader.batch_size or 1
        self._drop = loader.drop_last

    def settings(self) -> dict[str, object]:
        return {**super().settings(), "drop_last": self._drop}

    def blocks(self, length: int) -> Blocks:
        return self._share.cut(length, self._size, drop=self._drop)

    def batch(self, order: Sequence[Any], part: BlockPart) -> list[int]:
        return padded(order, part)

    def counts(self, order: Sequence[Any], blocks: Blocks, start: int) -> tuple[int, int]:
        part = blocks.part(start, self._share.worker)
        return part.mine, part.total


class BatchSource(IndexedSource):
    """A batch sampler of the user's: its batches are dealt out in turn, whole."""

    def blocks(self, length: int) -> Blocks:
        return self._share.cut(length, 1)

    def batch(self, order: Sequence[Any], part: BlockPart) -> list[int]:
        return list(order[part.start % len(order)])

    def counts(self, order: Sequence[Any], blocks: Blocks, start: int) -> tuple[int, int]:
        parts = [blocks.part(start, worker) for worker in range(blocks.workers)]
        sizes = [len(self.batch(order, part)) if part.mine else 0 for part in parts]
        return sizes[self._share.worker], sum(sizes)


class ShardBatches(Sampler[list[int]]):
    """The batch sampler given to torch: what is left of the current epoch, for this worker."""

    def __init__(self) -> None:
        self.now: Iterable[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.now)


def check_repeats(sampler: Any, order: Sequence[Any], seed: int, epoch: int) -> None:
    """Warn of a sampler that does not give the same order when asked again."""
    if order_of(sampler, seed, epoch) != order:
        logger.warning(
            "fleet.shard: %s gives another order each time it is asked, whatever the seed: "
            "two workers may read the same records, and resuming is not exact; let it draw "
            "from torch's generator, or give it set_epoch(epoch)",
            type(sampler).__name__,
        )
