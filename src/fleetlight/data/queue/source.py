# SPDX-License-Identifier: Apache-2.0
"""`RangeSource`: the records of a loader, range by range, as a shard queue deals them out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from fleetlight.data.order.blocks import Interval
from fleetlight.data.order.window_order import WindowOrder
from fleetlight.data.queue.client import (
    NOTHING,
    PARTS,
    Cut,
    QueueClient,
    QueueOptions,
    RangePosition,
    RangeRequest,
)
from fleetlight.data.sources.sampler import ShardBatches, SharedSampler
from fleetlight.data.sources.source import (
    Dealt,
    RecordSource,
    Shard,
    is_batched_by_torch,
    refuse_unbatched,
)
from fleetlight.data.sources.windows import WindowSampler
from fleetlight.errors import CheckpointError, ConfigError


class RangeBatch(NamedTuple):
    """A batch of a range: the range's number, the batch's positions, the range's end."""

    number: int
    start: int
    stop: int
    end: int


class RangeCutter(Iterator[list[Any]]):
    """The batches that torch loads next, perhaps of later ranges than those handed out.

    It requests the next range when it has cut up the last one. While no range is free it ends,
    however often torch asks.
    """

    def __init__(
        self,
        unit: int,
        by_record: bool,
        next_range: Callable[[int], Interval | None],
        announce: Callable[[RangeBatch], None],
    ) -> None:
        """Calls `announce` before the records of a batch are read."""
        self._unit, self._by_record, self._next_range = unit, by_record, next_range
        self._announce = announce
        self._order: Sequence[Any] = ()
        self._last = RangeBatch(-1, 0, 0, 0)
        #: batches that torch has taken and not loaded yet
        self._taken: deque[RangeBatch] = deque()
        self._has_ended = False

    def restart(self, order: Sequence[Any], last: RangeBatch) -> None:
        """Continue after a batch, in this order of the epoch."""
        self._order, self._last, self._has_ended = order, last, False
        self._taken.clear()

    def __next__(self) -> list[Any]:
        number, _, start, end = self._last
        if start >= end:
            number += 1
            start, end = self._request(number)
        stop = min(start + self._unit, end)
        self._last = RangeBatch(number, start, stop, end)
        self._taken.append(self._last)
        self._announce(self._last)
        return self.records(start, stop)

    def loaded(self) -> tuple[RangeBatch, int]:
        """The batch that torch has loaded next, and how many samples it has."""
        batch = self._taken.popleft()
        samples = batch.stop - batch.start if self._by_record else len(self._order[batch.start])
        return batch, samples

    def records(self, start: int, end: int) -> list[Any]:
        """The records of the batch that starts there, of a range that ends there."""
        stop = min(start + self._unit, end)
        if not self._by_record:
            return list(self._order[start])
        return list(self._order[start:stop])

    def _request(self, number: int) -> Interval:
        dealt = None if self._has_ended else self._next_range(number)
        if dealt is None:
            self._has_ended = True
            raise StopIteration
        return dealt


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


class RangeSource(RecordSource):
    """A position has the range in hand, and what is left of the epoch for all workers."""

    knows_its_end = False

    def __init__(self, loader: DataLoader[Any], shard: Shard, options: QueueOptions) -> None:
        _refuse(loader, shard)
        by_record = is_batched_by_torch(loader)
        sampler = loader.sampler if by_record else loader.batch_sampler
        self._sampler = SharedSampler(sampler, shard.workers)
        self._unit = (loader.batch_size or 1) if by_record else 1
        self._drop = loader.drop_last and by_record
        self._workers, self._range_batches = shard.workers, options.range_batches
        self._turn = QueueTurn(options, self._unit)
        self._windows = sampler if isinstance(sampler, WindowSampler) else None
        self._order: Sequence[Any] = ()
        self._cutter = RangeCutter(self._unit, by_record, self._turn.next_range, self._announce)
        self._batches = ShardBatches()
        #: what is to be dealt out of the epoch; None: all of it
        self._left: list[Interval] | None = None
        self._consumed = 0
        #: True where the next turn is another part of the last one
        self._continues = False
        #: the batch loaded last; None between two turns
        self._hand: RangeBatch | None = None
        #: the end of the batch handed out last
        self._reached = RangePosition(0, 0)

    def arguments(self) -> dict[str, Any]:
        return {"batch_sampler": self._batches}

    def steps(self) -> int:
        raise TypeError(
            "a loader with deal='queue' has no length: a worker gets as many batches as it has "
            "time for; len(loader.dataset) counts the records of all workers"
        )

    @property
    def order_name(self) -> str:
        return self._sampler.order_name

    def settings(self) -> dict[str, object]:
        return {
            **self._sampler.settings(),
            "drop_last": self._drop,
            "deal": "queue",
            "range_batches": self._range_batches,
        }

    def is_at_end(self, position: Mapping[str, Any]) -> bool:
        return position["left"] == [] and position["hand"] is None

    def begin(self, epoch: int, seed: int) -> None:
        order = self._order = self._sampler.order(seed, epoch)
        if self._hand is None:
            self.give_back()
            self._turn.number += 1 if self._continues else PARTS - self._turn.number % PARTS
            self._continues = False
            self._hand = RangeBatch(-1, 0, 0, 0)
        self._turn.open(epoch, self._whole() if self._left is None else self._left)
        number, _, stop, end = self._hand
        if stop < end:
            # others may have got a part of it since the position was saved
            self._hand = self._hand._replace(end=self._turn.dealt_end(number, stop, end))
        self._reached = _reached(self.position)
        self._cutter.restart(order, self._hand)
        self._batches.now = self._cutter

    def counted(self, loaded: Iterator[Any]) -> Iterator[Dealt]:
        for batch in loaded:
            self._hand, samples = self._cutter.loaded()
            self._consumed += self._hand.stop - self._hand.start
            # each batch counts fully, whatever the other workers have
            yield batch, samples, samples * self._workers

    def handed_out(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        self._turn.note(_reached(before), int(before["turn"]))
        self._reached = _reached(after)

    def put_back(self, before: Mapping[str, Any]) -> None:
        self._reached = _reached(before)

    def has_more(self) -> bool:
        assert self._hand is not None
        if self._turn.wait_for_more(self._hand.number + 1, self._reached):
            return True
        self._hand = None
        if self._turn.left:
            # the rest of the epoch is another turn
            self._left, self._continues = self._turn.left, True
            return True
        return False

    def give_back(self) -> None:
        self._turn.give_back(self._reached)

    def report(self) -> None:
        self._turn.report(self._reached)

    def records_after(self, position: Mapping[str, Any]) -> Sequence[Any] | None:
        """As in `RecordSource`; the queue alone knows where the next range starts."""
        _, start, end = position["hand"] or (0, 0, 0)
        return self._cutter.records(start, end) if start < end else None

    def shared(self, position: Mapping[str, Any]) -> dict[str, Any]:
        has_begun = position["hand"] is not None
        # other workers may have begun a turn that this one has still to begin
        turn = int(position["turn"])
        if not has_begun:
            turn += 1 if self._continues else PARTS - turn % PARTS
        remaining = self._turn.client.remaining(turn)
        left = position["left"]
        if remaining is not None or has_begun:
            left = [list(interval) for interval in remaining or ()]
        consumed = 0 if left is None else _count(self._whole()) - _count(left)
        return {"turn": -1, "hand": None, "left": left, "consumed": consumed}

    def at_turn(self, turn: int, left: Sequence[Interval]) -> dict[str, Any]:
        """The position of a worker that joins at the start of this turn."""
        return {
            "turn": turn - 1,
            "hand": None,
            "continues": bool(turn % PARTS),
            "left": [list(interval) for interval in left],
            "consumed": _count(self._whole()) - _count(left),
        }

    def adapted(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if ("left" in state and "dealt" not in state) or "consumed" not in state:
            return state
        if "dealt" in state:
            # lanes have begun the epoch
            if state["consumed"] and "remaining" not in state:
                raise CheckpointError(
                    "got the state_dict of a loader without deal='queue', within an epoch; load it "
                    "with fleet.shard(loader), or load a checkpoint of the job"
                )
            return {**state, "turn": -1, "hand": None, "left": state.get("remaining")}
        if "streams" in state:
            raise CheckpointError(
                "got the position of a stream, expected that of a loader of records by number"
            )
        consumed = int(state["consumed"])
        left = [[max(start, consumed), stop] for start, stop in self._whole() if consumed < stop]
        return {**state, "turn": -1, "hand": None, "left": left if consumed else None}

    @property
    def position(self) -> dict[str, Any]:
        left, hand = self._left, self._hand
        return {
            "consumed": self._consumed,
            "left": None if left is None else [list(interval) for interval in left],
            "turn": self._turn.number,
            "hand": None if hand is None else [hand.number, hand.stop, hand.end],
        }

    @position.setter
    def position(self, position: Mapping[str, Any]) -> None:
        left, hand = position.get("left"), position.get("hand")
        self._consumed = int(position.get("consumed", 0))
        self._left = None if left is None else [(int(start), int(stop)) for start, stop in left]
        self._continues = bool(position.get("continues", False))
        if position.get("turn", -1) >= 0:
            self._turn.number = int(position["turn"])
        self._hand = None if hand is None else RangeBatch(hand[0], hand[1], hand[1], hand[2])
        if not self._turn.is_open:
            self._reached = _reached(self.position)

    def _announce(self, batch: RangeBatch) -> None:
        """Let the data set load the windows of a batch, and the one after it in the range."""
        order = self._order
        if self._windows is not None and isinstance(order, WindowOrder):
            pieces = order.pieces(batch.start, batch.stop)
            last = order.windows[pieces[-1][0]]
            pieces += order.pieces(last.stop, min(batch.end, last.stop + 1))
            self._windows.will_read(order, *(number for number, _, _ in pieces))

    def _whole(self) -> list[Interval]:
        """All positions of an epoch that are dealt out."""
        length = len(self._sampler)
        stop = length - length % self._unit if self._drop else length
        return [(0, stop)] if stop else []


def _count(intervals: Sequence[Sequence[int]]) -> int:
    return sum(stop - start for start, stop in intervals)


def _reached(position: Mapping[str, Any]) -> RangePosition:
    number, at, _ = position["hand"] or (0, 0, 0)
    return RangePosition(max(0, number), at)


def _refuse(loader: DataLoader[Any], shard: Shard) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "fleet.shard: deal='queue' deals out records by their number, which a stream does not "
            "have; leave deal out (each worker then keeps its part of the stream), or read the "
            "files into a dataset with __getitem__"
        )
    refuse_unbatched(loader)
    if shard.tail != "join":
        raise ConfigError(
            f"fleet.shard: got deal='queue' and tail={shard.tail!r}, but there is no block that "
            "all workers share; leave tail out, and leave the last, short batch out with "
            "DataLoader(drop_last=True)"
        )
