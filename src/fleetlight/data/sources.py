# SPDX-License-Identifier: Apache-2.0
"""How the records of a loader are dealt out: by index, by ready batches, or from a stream."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from fleetlight.data.order import Blocks, Part, padded
from fleetlight.data.sampling import order_of
from fleetlight.data.stream import ShardedStream, SharedBatch
from fleetlight.errors import CheckpointError, ConfigError
from fleetlight.observe.log import logger

#: a batch, how many of its samples count, and how many do on all workers together
Dealt = tuple[Any, int, int]


@dataclasses.dataclass(frozen=True)
class Share:
    """Whose part of the records is wanted."""

    worker: int
    workers: int
    tail: str

    def __post_init__(self) -> None:
        self.cut(0, 1)  # refuses an unknown tail here rather than at the first batch

    def cut(self, length: int, size: int, *, drop: bool = False) -> Blocks:
        """An epoch in blocks of `size` entries for each worker."""
        return Blocks(length, size, self.workers, "drop" if drop else self.tail)


class Source(abc.ABC):
    """The records of one loader, and how far they have been dealt out."""

    #: a position may be behind the last batch, and nobody knows
    hides_its_end = False

    @abc.abstractmethod
    def arguments(self) -> dict[str, Any]:
        """What the DataLoader is to be made with."""

    @abc.abstractmethod
    def steps(self) -> int:
        """Steps of a whole epoch."""

    @abc.abstractmethod
    def settings(self) -> dict[str, object]:
        """What it deals out and how: the same on all workers."""

    #: True when it is known of a position whether a batch follows
    knows_its_end = True

    def is_at_end(self, position: Mapping[str, Any]) -> bool:
        """True when a position is known to be behind the last batch of an epoch."""
        return False

    @abc.abstractmethod
    def begin(self, epoch: int, seed: int) -> None:
        """Get ready to deal out the rest of an epoch."""

    @abc.abstractmethod
    def deal(self, loaded: Iterator[Any]) -> Iterator[Dealt]:
        """What the DataLoader has loaded, with what it counts; moves the position."""

    def handed_out(self, before: Mapping[str, Any], behind: Mapping[str, Any]) -> None:
        """A batch is about to be handed out: the positions on both sides of it."""
        return

    def has_more(self) -> bool:
        """True when there is more to deal out, where all that was dealt out is trained on."""
        return False

    def put_back(self, before: Mapping[str, Any]) -> None:
        """The batch handed out last is not trained on: a position is before it, as it was."""
        return

    def give_back(self) -> None:
        """The iteration ends here, before the end of the epoch."""
        return

    def records_behind(self, position: Mapping[str, Any]) -> Sequence[Any] | None:
        """Which records come next, in the order of the epoch begun last; None: nobody knows."""
        return None

    def tell(self) -> None:
        """Say how far this worker is, to whoever deals out the records."""
        return

    def shared(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """What of a position is otherwise for all workers than for this one."""
        return {}

    def adapted(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A position that was saved with records dealt out in another way, if that can be."""
        if state.get("left") is None:
            return state
        raise CheckpointError(
            "this position was saved amid an epoch by a loader with deal='queue', and what is left "
            "of it is in several pieces; load it with fleet.shard(loader, deal='queue')"
        )

    @property
    @abc.abstractmethod
    def position(self) -> dict[str, Any]:
        """How far into the epoch all workers together are. `{}` set is its beginning."""

    @position.setter
    @abc.abstractmethod
    def position(self, position: Mapping[str, Any]) -> None: ...


def source_of(loader: DataLoader[Any], share: Share) -> Source:
    """How the records of this loader are dealt out."""
    if isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, share)
    refuse_unbatched(loader)
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return BatchSource(loader.batch_sampler, share)
    return MapSource(loader, share)


def refuse_unbatched(loader: DataLoader[Any]) -> None:
    """Records by index are dealt out in batches."""
    if loader.batch_sampler is None:
        raise ConfigError(
            "fleet.shard: this loader has no automatic batching (batch_size=None); give it a "
            "batch_size or a batch_sampler"
        )


class IndexedSource(Source):
    """What a sampler yields, in blocks; our own batch sampler tells torch which."""

    def __init__(self, sampler: Any, share: Share) -> None:
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
    def batch(self, order: Sequence[Any], part: Part) -> list[int]:
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

    def __init__(self, loader: DataLoader[Any], share: Share) -> None:
        super().__init__(loader.sampler, share)
        self._size = loader.batch_size or 1
        self._drop = loader.drop_last

    def settings(self) -> dict[str, object]:
        return {**super().settings(), "drop_last": self._drop}

    def blocks(self, length: int) -> Blocks:
        return self._share.cut(length, self._size, drop=self._drop)

    def batch(self, order: Sequence[Any], part: Part) -> list[int]:
        return padded(order, part)

    def counts(self, order: Sequence[Any], blocks: Blocks, start: int) -> tuple[int, int]:
        part = blocks.part(start, self._share.worker)
        return part.mine, part.total


class BatchSource(IndexedSource):
    """A batch sampler of the user's: its batches are dealt out in turn, whole."""

    def blocks(self, length: int) -> Blocks:
        return self._share.cut(length, 1)

    def batch(self, order: Sequence[Any], part: Part) -> list[int]:
        return list(order[part.start % len(order)])

    def counts(self, order: Sequence[Any], blocks: Blocks, start: int) -> tuple[int, int]:
        parts = [blocks.part(start, worker) for worker in range(blocks.workers)]
        sizes = [len(self.batch(order, part)) if part.mine else 0 for part in parts]
        return sizes[self._share.worker], sum(sizes)


class StreamSource(Source):
    """A stream of records: each worker reads it all and keeps its part of every block.

    Its position is how many records each loading process has taken from the stream, and whose
    turn it is.
    """

    knows_its_end = False
    hides_its_end = True

    def __init__(self, loader: DataLoader[Any], share: Share) -> None:
        if loader.batch_size is None:
            raise ConfigError(
                "fleet.shard: this loader's dataset yields ready batches (batch_size=None), whose "
                "records cannot be dealt out; give the DataLoader a batch_size, or shard the "
                "dataset yourself with fleet.worker_index() and fleet.worker_num()"
            )
        self._blocks = share.cut(0, loader.batch_size, drop=loader.drop_last)
        self._dataset = cast("IterableDataset[Any]", loader.dataset)
        self._processes = max(1, loader.num_workers)
        self._taken, self._turn = [0] * self._processes, 0
        self._stream = ShardedStream(
            self._dataset, self._blocks, share.worker, loader.collate_fn, self._processes
        )

    def arguments(self) -> dict[str, Any]:
        return {"dataset": self._stream, "batch_size": None, "collate_fn": _as_it_is}

    def steps(self) -> int:
        length = len(self._dataset)  # type: ignore[arg-type]
        return dataclasses.replace(self._blocks, length=length).steps()

    def settings(self) -> dict[str, object]:
        return {
            "records": length_of(self._dataset),
            "num_workers": self._processes,
            "drop_last": self._blocks.tail == "drop",
        }

    def begin(self, epoch: int, seed: int) -> None:
        self._stream.start_at(epoch, seed, self._turn, self._taken)

    def deal(self, loaded: Iterator[SharedBatch]) -> Iterator[Dealt]:
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
                f"the position in this stream was reached with {len(taken)} loading processes, "
                f"this loader has {self._processes}; make the DataLoader with "
                f"num_workers={len(taken)}"
            )
        self._taken = taken if any(taken) else [0] * self._processes
        self._turn = int(position.get("turn", 0))


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


def length_of(records: Any) -> int | None:
    """How many there are, if that is known."""
    try:
        return len(records)
    except (TypeError, NotImplementedError):
        return None


def _as_it_is(batch: Any) -> Any:
    return batch
