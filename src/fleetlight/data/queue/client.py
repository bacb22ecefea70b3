# SPDX-License-Identifier: Apache-2.0
"""`QueueClient`: a worker's access to the shard queue of one loader."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from fleetlight.data.order.blocks import Interval
from fleetlight.errors import ConfigError

#: where nothing is left of a turn
NOTHING: Interval = (0, 0)


class RangePosition(NamedTuple):
    """How far a worker is in a turn: at a position in its range of that number."""

    number: int
    at: int


@dataclasses.dataclass(frozen=True)
class RangeRequest:
    """Which range a worker wants, and what it has done."""

    turn: int
    epoch: int
    number: int
    reached: RangePosition
    #: the first turn that a later life of this worker may ask for
    back: int
    whole: Sequence[Interval]
    unit: int
    batches: int
    waits: bool


class QueueClient(Protocol):
    """Deals out the records of one loader to all workers."""

    def deal(self, ask: RangeRequest) -> Interval | None:
        """The range of that number; `NOTHING`: all is done, None: others may give some back."""

    def reached(self, turn: int, place: RangePosition, *, gives_back: bool) -> None:
        """All before is done; `gives_back`: and this worker does no more of the turn."""

    def remaining(self, turn: int) -> list[Interval] | None:
        """What is not done yet of a turn, whoever has it in hand; None: nobody has begun it."""

    def steps(self) -> tuple[int, int]:
        """Steps of optimizers this worker has made, and those that are with the servers."""

    def settle(self) -> None:
        """All steps are with the servers when it returns, and for now no others come."""

    def resume(self) -> None:
        """A turn is over: other steps may come."""

    def reopen(self) -> None:
        """It goes on after all: others have given something back."""


@dataclasses.dataclass(frozen=True)
class QueueOptions:
    """How a loader is dealt out on demand."""

    dealer: QueueClient
    #: batches of a range, at most
    batches: int

    def __post_init__(self) -> None:
        if isinstance(self.batches, bool) or not isinstance(self.batches, int) or self.batches < 1:
            raise ConfigError(
                f"fleet.shard: got range_batches={self.batches!r}, expected a whole number from 1"
            )
