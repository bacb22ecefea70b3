# SPDX-License-Identifier: Apache-2.0
"""The shard queue: server 0 leases ranges of a loader's records to workers on demand."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from fleetlight.ps.messages.base import MessageBase


class LeaseRequest(MessageBase, frozen=True):
    """Request the worker's next range of records. Reply: LeaseReply.

    The reply is Done while other workers hold all remaining records; with `waits` the worker asks
    again.
    """

    repeatable: ClassVar[bool] = True
    loader: int
    #: number of the pass over the loader by all workers; from 1
    turn: int
    epoch: int
    #: number of the worker's lease in this pass; a repeated request returns the same range
    number: int
    #: a lease of the worker, and a position in it: all records before are done
    reached: tuple[int, int]
    #: the first pass that the worker may still request after a restart
    back: int
    #: positions of the epoch that this pass leases out
    whole: list[tuple[int, int]]
    #: records of one batch, and the maximum number of batches in a range
    unit: int
    batches: int
    #: the worker has no other work
    waits: bool = False


class LeaseReply(MessageBase, frozen=True):
    """Positions in the epoch's order; empty when all records are done."""

    start: int
    stop: int
    #: this pass has ended early: the records that the next pass of the same epoch leases out
    left: list[tuple[int, int]] = msgspec.field(default_factory=list)
    #: how many workers train now; 0 where their number is fixed
    active: int = 0


class LeaseProgress(MessageBase, frozen=True):
    """The worker's progress in a pass, as in `LeaseRequest`. Reply: Done."""

    repeatable: ClassVar[bool] = True
    loader: int
    turn: int
    reached: tuple[int, int]
    #: the worker returns its leases of this pass to the queue
    gives_back: bool = False


class RemainingRequest(MessageBase, frozen=True):
    """Which records of a pass are not done yet. Reply: Remaining."""

    repeatable: ClassVar[bool] = True
    loader: int
    turn: int


class Remaining(MessageBase, frozen=True):
    """Free or leased ranges; None for a pass that no worker has started."""

    ranges: list[tuple[int, int]] | None
