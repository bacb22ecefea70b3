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
    """Whose part of the records is wanted."""

    worker: int
    workers: int
    tail: str

    def __post_init__(self) -> None:
        self.cut(0, 1)  # refuses an unknown tail here rather than at the first batch

    def cut(self, length: int, size: int, *, drop: bool = False) -> Blocks:
        """An epoch in blocks of `size` entries for each worker."""
        return Blocks(length, size, self.workers, "drop" if drop else self.tail)


class RecordSource(abc.ABC):
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


def refuse_unbatched(loader: DataLoader[Any]) -> None:
    """Records by index are dealt out in batches."""
    if loader.batch_sampler is None:
        raise ConfigError(
            "fleet.shard: this loader has no automatic batching (batch_size=None); give it a "
            "batch_size or a batch_sampler"
        )


def length_of(records: Any) -> int | None:
    """How many there are, if that is known."""
    try:
        return len(records)
    except (TypeError, NotImplementedError):
        return None
