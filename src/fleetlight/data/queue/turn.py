# SPDX-License-Identifier: Apache-2.0
"""`QueueTurn`: which ranges a worker requests, and how much of them it reports as done."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from fleetlight.data.order.blocks import Interval
from fleetlight.data.queue.client import (
    NOTHING,
    Cut,
    QueueClient,
    QueueOptions,
    RangePosition,
    RangeRequest,
)


class _StepStart(NamedTuple):
    """The position before the first batch of a step, after so many steps."""

    steps: int
    turn: int
    position: RangePosition


class _StepLog:
    """Positions before the last steps of a worker.

    A worker that restarts repeats its last step. So what it reports as done ends one step before
    the last one that the servers have.
    """

    def __init__(self, client: QueueClient) -> None:
        self._client = client
        self._starts: deque[_StepStart] = deque()

    def add(self, turn: int, position: RangePosition) -> None:
        """Note the position before a batch; of one step's batches the first counts."""
        made, _ = self._client.steps()
        if not self._starts or self._starts[-1].steps != made:
            self._starts.append(_StepStart(made, turn, position))

    def done(self, turn: int) -> RangePosition:
        """The position in this turn up to which a later incarnation needs no record."""
        _, acknowledged = self._client.steps()
        while len(self._starts) > 2 and self._starts[2].steps <= acknowledged:
            self._starts.popleft()
        if len(self._starts) > 1 and self._starts[1].steps <= acknowledged:
            first = self._starts[0]
            if first.turn == turn:
                return first.position
        return RangePosition(0, 0)

    def first_turn(self, turn: int) -> int:
        """The first turn of which a later incarnation may request ranges."""
        return min(turn, self._starts[0].turn) if self._starts else turn


class QueueTurn:
    """One worker's part in a turn, which is an iteration of the loader by all workers."""

    def __init__(self, options: QueueOptions, unit: int) -> None:
        self.client, self._batches, self._unit = options.client, options.range_batches, unit
        self._steps = _StepLog(options.client)
        #: counts the turns, from 1
        self.number = 0
        #: False once the turn is over or given back
        self.is_open = False
        #: what a turn that ended early leaves to the next one
        self.left: list[Interval] = []
        self._epoch = 0
        self._intervals: Sequence[Interval] = ()

    def open(self, epoch: int, intervals: Sequence[Interval]) -> None:
        """Start or continue the turn that deals out these positions of an epoch."""
        self._epoch, self._intervals, self.is_open = epoch, intervals, True

    def next_range(self, number: int) -> Interval | None:
        """The range of that number; None where none is free."""
        dealt = self._request(number, self._steps.done(self.number), waits=False)
        return None if dealt == NOTHING or isinstance(dealt, Cut) else dealt

    def dealt_end(self, number: int, stop: int, end: int) -> int:
        """The end of a range in hand that a saved position names; part of it may be given back."""
        dealt = self._request(number, self._steps.done(self.number), waits=False)
        if dealt is None or isinstance(dealt, Cut):
            return stop
        return max(stop, min(end, dealt[1]))

    def wait_for_more(self, number: int, reached: RangePosition) -> bool:
        """Wait until other workers give records back, or the turn is over; False: it is over.

        A turn that has ended early has something left.
        """
        self.client.settle()
        while (dealt := self._request(number, reached, waits=True)) is None:
            continue
        if dealt != NOTHING and not isinstance(dealt, Cut):
            self.client.reopen()
            return True
        self.is_open = False
        self.left = list(dealt.left) if isinstance(dealt, Cut) else []
        self.client.resume()
        return False

    def give_back(self, reached: RangePosition) -> None:
        """Let other workers have the records after this position."""
        if self.is_open:
            self.is_open = False
            self.client.settle()
            self.client.reached(self.number, reached, gives_back=True)
            self.client.resume()

    def report(self, reached: RangePosition) -> None:
        """Report all before this position as done."""
        if self.is_open:
            self.client.reached(self.number, reached, gives_back=False)

    def note(self, position: RangePosition, turn: int) -> None:
        """A batch is handed out, from this position on."""
        self._steps.add(turn, position)

    def _request(
        self, number: int, reached: RangePosition, *, waits: bool
    ) -> Interval | Cut | None:
        return self.client.deal(
            RangeRequest(
                turn=self.number,
                epoch=self._epoch,
                number=number,
                reached=reached,
                back=self._steps.first_turn(self.number),
                whole=self._intervals,
                unit=self._unit,
                batches=self._batches,
                waits=waits,
            )
        )
