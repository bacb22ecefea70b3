# SPDX-License-Identifier: Apache-2.0
"""`QueueClient`: a worker's access to the shard queue of one loader."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from fleetlight.data.order.blocks import Interval
from fleetlight.errors import ConfigError

#: Turns have numbers that are multiples of it. Where a turn is cut, its next part has the next
#: number, so that a worker that leaves its loop early finds the number of the next turn.
PARTS = 1 << 16
#: the reply when a turn is over
NOTHING: Interval = (0, 0)


@dataclasses.dataclass(frozen=True)
class Cut:
    """The turn has ended early; the next turn of the epoch deals out what is left."""

    left: Sequence[Interval]


class RangePosition(NamedTuple):
    """How far a worker is in a turn: at a position in its range of that number."""

    number: int
    at: int


@dataclasses.dataclass(frozen=True)
class RangeRequest:
    """Which range a worker requests, and what it has done."""

    turn: int
    epoch: int
    #: counts the worker's ranges in the turn; a repeated request gets the same range
    number: int
    reached: RangePosition
    #: the first turn that a later incarnation of this worker may request
    back: int
    #: all that the turn deals out
    whole: Sequence[Interval]
    #: records in a batch, and batches in a range at most
    unit: int
    batches: int
    #: the worker has no other batch: reply when there is one, or none is left
    waits: bool


class QueueClient(Protocol):
    """Gets the records of one loader from a queue that all workers share."""

    def deal(self, request: RangeRequest) -> Interval | Cut | None:
        """The requested range; `NOTHING`: all is done, None: others may give some back."""

    def reached(self, turn: int, position: RangePosition, *, gives_back: bool) -> None:
        """Report all before as done; `gives_back`: this worker leaves the rest to others."""

    def remaining(self, turn: int) -> list[Interval] | None:
        """What is not done yet of a turn, in any worker's hands; None: it has not begun."""

    def steps(self) -> tuple[int, int]:
        """Optimizer steps of this worker: those made, and those that the servers have."""

    def settle(self) -> None:
        """Wait until the servers have all steps, and make no other one for now."""

    def resume(self) -> None:
        """The turn is over: allow steps again."""

    def reopen(self) -> None:
        """The turn continues, since others gave records back: allow steps again."""


@dataclasses.dataclass(frozen=True)
class QueueOptions:
    """The queue of a loader, and the batches of a range at most."""

    client: QueueClient
    range_batches: int

    def __post_init__(self) -> None:
        batches = self.range_batches
        if isinstance(batches, bool) or not isinstance(batches, int) or batches < 1:
            raise ConfigError(
                f"fleet.shard: got range_batches={batches!r}, expected a whole number from 1"
            )
