# SPDX-License-Identifier: Apache-2.0
"""`RecordSource`: how the records of one loader are dealt out, and how far."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from fleetlight.data.order.blocks import Blocks
from fleetlight.errors import CheckpointError, ConfigError

#: a batch, how many of its samples count, and how many do on all workers together
Dealt = tuple[Any, int, int]


@dataclasses.dataclass(frozen=True)
class Shard:
    """Which part of the records a worker gets."""

    worker: int
    workers: int
    tail: str

    def __post_init__(self) -> None:
        self.cut(0, 1)  # refuses an unknown tail here rather than at the first batch

    def cut(self, length: int, size: int, *, drop: bool = False) -> Blocks:
        """An epoch in blocks of `size` entries for each worker."""
        return Blocks(length, size, self.workers, "drop" if drop else self.tail)


class RecordSource(abc.ABC):
    """The records of one loader. A position says how far all workers together are."""

    #: False where only the next load shows whether the epoch has another batch
    knows_its_end = True
    #: True where a saved position may be after the last batch without saying so
    may_resume_at_end = False

    @abc.abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Arguments for the DataLoader that loads the batches."""

    @abc.abstractmethod
    def steps(self) -> int:
        """Steps of a whole epoch."""

    @abc.abstractmethod
    def settings(self) -> dict[str, object]:
        """Settings that must be the same on all workers."""

    @property
    def order_name(self) -> str:
        """What the order depends on, besides the seed and the epoch; "" where nothing is known."""
        return ""

    @property
    @abc.abstractmethod
    def position(self) -> dict[str, Any]:
        """The position in the epoch; set to `{}` for its start."""

    @position.setter
    @abc.abstractmethod
    def position(self, position: Mapping[str, Any]) -> None: ...

    def is_at_end(self, position: Mapping[str, Any]) -> bool:
        """True when a position is known to be after the last batch of an epoch."""
        return False

    @abc.abstractmethod
    def begin(self, epoch: int, seed: int) -> None:
        """Prepare to deal out the rest of an epoch."""

    @abc.abstractmethod
    def counted(self, loaded: Iterator[Any]) -> Iterator[Dealt]:
        """The loaded batches with their counts; moves the position."""

    def records_after(self, position: Mapping[str, Any]) -> Sequence[Any] | None:
        """The records of the batch after a position in the current epoch; None: unknown."""
        return None

    def before(self, position: dict[str, Any], after: dict[str, Any], total: int) -> dict[str, Any]:
        """The position before a batch with `total` samples, with what has become known since."""
        return position

    # -- for records that a queue deals out

    def handed_out(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """A batch is about to be handed out, between these positions."""
        return

    def put_back(self, before: Mapping[str, Any]) -> None:
        """The batch handed out last is not trained on; `before` is the position before it."""
        return

    def has_more(self) -> bool:
        """True when there are more records, after all batches were trained on."""
        return False

    def give_back(self) -> None:
        """The loop ends before the end of the epoch."""
        return

    def report(self) -> None:
        """Report the position of this worker to the queue."""
        return

    # -- for checkpoints

    def shared(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a position that differ for the job and for this worker."""
        return {}

    def adapted(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state that was saved with another kind of source, where it can be converted."""
        if "of" in state and state.get("consumed"):
            raise CheckpointError(
                "got a position that a loader with deal='shards' saved within an epoch: each "
                "worker has one in its own shards; load it with fleet.shard(loader, deal='shards')"
            )
        if state.get("left") is None:
            return state
        raise CheckpointError(
            "got a position that a loader with deal='queue' saved within an epoch: the records "
            "left are in several ranges; load it with fleet.shard(loader, deal='queue')"
        )


def refuse_unbatched(loader: DataLoader[Any]) -> None:
    """ConfigError for a loader of records by number that makes no batches."""
    if loader.batch_sampler is None:
        raise ConfigError(
            "fleet.shard: this loader has no automatic batching (batch_size=None); give it a "
            "batch_size or a batch_sampler"
        )


def is_batched_by_torch(loader: DataLoader[Any]) -> bool:
    """True where the loader cuts the records of its sampler into batches of one size."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return loader.batch_size is not None and sampler is loader.sampler
