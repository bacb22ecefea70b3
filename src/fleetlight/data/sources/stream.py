# SPDX-License-Identifier: Apache-2.0
"""`StreamSource`: a stream of records, dealt out block by block."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from fleetlight.data.order.blocks import Blocks
from fleetlight.data.order.epoch_order import epoch_seed
from fleetlight.data.order.seeded_rng import SeededRng
from fleetlight.data.sources.sampler import length_of
from fleetlight.data.sources.source import Dealt, RecordSource, Shard
from fleetlight.errors import CheckpointError, ConfigError


class SharedBatch(NamedTuple):
    """A batch from a loading process, with its counts."""

    batch: Any
    mine: int
    total: int
    #: the loading process it comes from
    process: int
    #: records that the block took from the stream; 0: no batch, the process skips its turn
    taken: int


class ShardedStream(IterableDataset[SharedBatch]):
    """Reads the whole stream and keeps one worker's part of each block.

    All workers must cut the same blocks, so random numbers in the stream start from the job's
    seed. A loading process cuts what the stream yields there. torch takes turns between loading
    processes, in the same order on every worker.
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
        # epoch, seed, turn, records taken; in shared memory: loading processes may outlive an epoch
        self._start = torch.zeros(3 + processes, dtype=torch.int64)
        self._start.share_memory_()  # type: ignore[no-untyped-call]

    def start_at(self, epoch: int, seed: int, turn: int, taken: Sequence[int]) -> None:
        """Set where the next iteration starts, in each loading process."""
        self._start.copy_(torch.tensor([epoch, epoch_seed(seed, epoch), turn, *taken]))

    def __iter__(self) -> Iterator[SharedBatch]:
        info = get_worker_info()
        process = 0 if info is None else info.id
        epoch, seed, turn, *taken = self._start.tolist()
        if process < turn:
            # torch starts with process 0, whose turn was before the position
            yield SharedBatch(None, 0, 0, process, 0)
        chance = SeededRng((seed + process) % 2**63)
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
        """The records for padding, and an iterator over those after the first `taken`."""
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


class StreamSource(RecordSource):
    """A stream of records: each worker reads it all and keeps its part of every block.

    The position is how many records each loading process has taken, and whose turn is next.
    """

    knows_its_end = False
    may_resume_at_end = True

    def __init__(self, loader: DataLoader[Any], shard: Shard) -> None:
        if loader.batch_size is None:
            raise ConfigError(
                "fleet.shard: this loader's dataset yields ready batches (batch_size=None), whose "
                "records cannot be shared; give the DataLoader a batch_size, or shard the dataset "
                "yourself with fleet.worker_index() and fleet.worker_num()"
            )
        self._blocks = shard.cut(0, loader.batch_size, drop=loader.drop_last)
        self._dataset = cast("IterableDataset[Any]", loader.dataset)
        self._processes = max(1, loader.num_workers)
        self._taken, self._turn = [0] * self._processes, 0
        self._stream = ShardedStream(
            self._dataset, self._blocks, shard.worker, loader.collate_fn, self._processes
        )

    def arguments(self) -> dict[str, Any]:
        return {"dataset": self._stream, "batch_size": None, "collate_fn": _as_it_is}

    def steps(self) -> int:
        length = len(self._dataset)  # type: ignore[arg-type]
        return dataclasses.replace(self._blocks, length=length).steps()

    @property
    def order_name(self) -> str:
        return str(getattr(self._dataset, "order_name", ""))

    def settings(self) -> dict[str, object]:
        return {
            "records": length_of(self._dataset),
            "num_workers": self._processes,
            "drop_last": self._blocks.tail == "drop",
        }

    def begin(self, epoch: int, seed: int) -> None:
        self._stream.start_at(epoch, seed, self._turn, self._taken)

    def counted(self, loaded: Iterator[SharedBatch]) -> Iterator[Dealt]:
        for shared in loaded:
            if shared.taken:
                self._taken[shared.process] += shared.taken
                self._turn = (shared.process + 1) % self._processes
                yield shared.batch, shared.mine, shared.total

    @property
    def position(self) -> dict[str, Any]:
        return {"consumed": sum(self._taken), "streams": list(self._taken), "turn": self._turn}

    @position.setter
    def position(self, position: Mapping[str, Any]) -> None:
        taken = [int(records) for records in position.get("streams", [])]
        if any(taken) and len(taken) != self._processes:
            raise CheckpointError(
                f"this position in a stream was saved with {len(taken)} loading processes, but the "
                f"loader has {self._processes}; make the DataLoader with num_workers={len(taken)}"
            )
        self._taken = taken if any(taken) else [0] * self._processes
        self._turn = int(position.get("turn", 0))


def _as_it_is(batch: Any) -> Any:
    return batch
