# SPDX-License-Identifier: Apache-2.0
"""Records of a loader that are dealt out on demand, by server 0."""

from __future__ import annotations

from typing import ClassVar

from fleetlight.ps.messages.base import MessageBase


class LeaseRequest(MessageBase, frozen=True, tag="Deal"):
    """The worker wants records of a loader: its next range. Answer: LeaseReply.

    Or Done, where all that is not done is in the hands of others: with `waits` it asks again then.
    """

    repeatable: ClassVar[bool] = True
    loader: int
    #: counts the iterations of the loader, each by all workers; from 1
    turn: int
    epoch: int
    #: counts the worker's ranges in a turn; asked for again, it is the same
    number: int
    #: a range of the worker, and a position in it: all before is done
    reached: tuple[int, int]
    #: the first turn that any life of the worker may still ask for
    back: int
    #: positions of the epoch that are to be dealt out in this turn
    whole: list[tuple[int, int]]
    #: records of one batch, and how many batches a range has at most
    unit: int
    batches: int
    #: the worker has nothing else to do
    waits: bool = False


class LeaseReply(MessageBase, frozen=True, tag="Dealt"):
    """Positions in the epoch's order; none where all is done."""

    start: int
    stop: int


class LeaseProgress(MessageBase, frozen=True, tag="Reached"):
    """What the worker has done of a turn, as in Deal. Answer: Done."""

    repeatable: ClassVar[bool] = True
    loader: int
    turn: int
    reached: tuple[int, int]
    #: it does no more in this turn: what it has in hand is others'
    gives_back: bool = False


class RemainingRequest(MessageBase, frozen=True, tag="Remain"):
    """Which records of a turn are not done yet. Answer: Remaining."""

    repeatable: ClassVar[bool] = True
    loader: int
    turn: int


class Remaining(MessageBase, frozen=True):
    """Free, or in somebody's hands; None where nobody has begun the turn."""

    ranges: list[tuple[int, int]] | None
