# SPDX-License-Identifier: Apache-2.0
"""`RangeSource`: records of a loader range by range, as somebody deals them out to all workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from fleetlight.data.order.blocks import Interval
from fleetlight.data.order.epoch_order import order_of
from fleetlight.data.queue.client import NOTHING, QueueOptions, RangePosition, RangeRequest
from fleetlight.data.sources.indexed import ShardBatches, check_repeats
from fleetlight.data.sources.source import Dealt, RecordSource, Shard, length_of, refuse_unbatched
from fleetlight.errors import CheckpointError, ConfigError


class _Cut(NamedTuple):
    """A batch that the sampler has given to torch: whose range it is of, and where."""

    number: int
    start: int
    stop: int
    #: of its range
    end: int


class _Note(NamedTuple):
    """After so many steps the worker was at a place, and handed out the next batch."""

    made: int
    turn: int
    place: RangePosition


class RangeSource(RecordSource):
    """Asks for the next range when the one before is cut into batches.

    Behind the position are batches that torch has loaded ahead, perhaps of later ranges. What is
    told to be done is one step behind what the servers have: a worker that is started again makes
    its last step again, so it needs the batches of that one.
    """

    knows_its_end = False

    def __init__(self, loader: DataLoader[Any], share: Shard, queue: QueueOptions) -> None:
        _refuse(loader, share)
        by_record = loader.batch_size is not None and type(loader.batch_sampler) is BatchSampler
        self._sampler: Any = loader.sampler if by_record else loader.batch_sampler
        self._by_record = by_record
        self._unit = (loader.batch_size or 1) if by_record else 1
        self._drop = loader.drop_last and by_record
        self._workers = share.workers
        self._dealer, self._most = queue.dealer, queue.batches
        self._is_checked = share.workers == 1
        self._batches = ShardBatches()
        self._order: Sequence[Any] = ()
        self._epoch = 0
        #: counts the turns begun
        self._turn = 0
        #: the turn in hand goes on: it is neither over nor given up
        self._is_open = False
        #: what is to be dealt out of the epoch; None: all of it
        self._left: list[Interval] | None = None
        self._consumed = 0
        #: the range of the batch loaded last, and how far it is cut: number, position, end
        self._hand: _Cut | None = None
        #: the same for the sampler, which may be further, and what it has given to torch since
        self._ahead: _Cut | None = None
        self._cuts: deque[_Cut] = deque()
        #: for now there is nothing for this worker
        self._is_dry = False
        #: where the batch handed out last ends
        self._out: Mapping[str, Any] = {}
        self._notes: deque[_Note] = deque()

    def arguments(self) -> dict[str, Any]:
        return {"batch_sampler": self._batches}

    def steps(self) -> int:
        raise TypeError(
            "a loader with deal='queue' has no length: a worker gets as many batches as it has "
            "time for; len(loader.dataset) counts the records of all workers"
        )

    def settings(self) -> dict[str, object]:
        return {
            "records": length_of(self._sampler),
            "sampler": type(self._sampler).__name__,
            "drop_last": self._drop,
            "deal": "queue",
            "range_batches": self._most,
        }

    def is_at_end(self, position: Mapping[str, Any]) -> bool:
        return position["left"] == [] and position["hand"] is None

    def begin(self, epoch: int, seed: int) -> None:
        self._order, self._epoch = order_of(self._sampler, seed, epoch), epoch
        if not self._is_checked:
            self._is_checked = True
            check_repeats(self._sampler, self._order, seed, epoch)
        if self._hand is None:
            self.give_back()
            self._turn += 1
            self._hand = _Cut(-1, 0, 0, 0)
        self._hand = self._as_dealt(self._hand)
        self._is_open = True
        self._out = self.position
        self._ahead, self._is_dry = self._hand, False
        self._cuts.clear()
        self._batches.now = _Batches(self)

    def next_batch(self) -> list[Any]:
        """What torch is to load next; the end of an iteration while there is nothing."""
        assert self._ahead is not None
        if self._ahead.stop >= self._ahead.end:
            self._ahead = self._next_range(self._ahead.number + 1)
        number, _, start, end = self._ahead
        stop = min(start + self._unit, end)
        self._ahead = _Cut(number, start, stop, end)
        self._cuts.append(self._ahead)
        return list(self._order[start:stop] if self._by_record else self._order[start])

    def deal(self, loaded: Iterator[Any]) -> Iterator[Dealt]:
        for batch in loaded:
            self._hand = cut = self._cuts.popleft()
            self._consumed += cut.stop - cut.start
            samples = cut.stop - cut.start if self._by_record else len(self._order[cut.start])
            # each batch counts fully, whatever others have
            yield batch, samples, samples * self._workers

    def handed_out(self, before: Mapping[str, Any], behind: Mapping[str, Any]) -> None:
        made, _ = self._dealer.steps()
        if not self._notes or self._notes[-1].made != made:
            self._notes.append(_Note(made, int(before["turn"]), _place(before)))
        self._out = behind

    def put_back(self, before: Mapping[str, Any]) -> None:
        self._out = before

    def has_more(self) -> bool:
        self._dealer.settle()
        assert self._hand is not None
        place = _place(self._out)
        while (dealt := self._ask(self._hand.number + 1, place, waits=True)) is None:
            continue
        if dealt == NOTHING:
            self._is_open, self._hand = False, None
            self._dealer.resume()
        else:
            self._dealer.reopen()
        return dealt != NOTHING

    def give_back(self) -> None:
        if self._is_open:
            self._is_open = False
            self._dealer.settle()
            self._dealer.reached(self._turn, _place(self._out), gives_back=True)
            self._dealer.resume()

    def records_behind(self, position: Mapping[str, Any]) -> Sequence[Any] | None:
        """As in `RecordSource`; where another range begins, only who deals them out knows."""
        _, start, end = position["hand"] or (0, 0, 0)
        stop = min(start + self._unit, end)
        return list(self._order[start:stop]) if start < stop else None

    def tell(self) -> None:
        if self._is_open:
            self._dealer.reached(self._turn, _place(self._out), gives_back=False)

    def shared(self, position: Mapping[str, Any]) -> dict[str, Any]:
        is_begun = position["hand"] is not None
        # others may have begun a turn that this worker has still to begin
        told = self._dealer.remaining(position["turn"] + (not is_begun))
        left = position["left"]
        if told is not None or is_begun:
            left = [list(one) for one in told or ()]
        consumed = 0 if left is None else _count(self._whole()) - _count(left)
        return {"turn": -1, "hand": None, "left": left, "consumed": consumed}

    def adapted(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if "left" in state or "consumed" not in state:
            return state
        if "streams" in state:
            raise CheckpointError("a position in a stream was loaded into a loader of records")
        consumed = int(state["consumed"])
        left = [[max(start, consumed), stop] for start, stop in self._whole() if consumed < stop]
        return {**state, "turn": -1, "hand": None, "left": left if consumed else None}

    @property
    def position(self) -> dict[str, Any]:
        hand = self._hand
        return {
            "consumed": self._consumed,
            "left": None if self._left is None else [list(one) for one in self._left],
            "turn": self._turn,
            "hand": None if hand is None else [hand.number, hand.stop, hand.end],
        }

    @position.setter
    def position(self, position: Mapping[str, Any]) -> None:
        left, hand = position.get("left"), position.get("hand")
        self._consumed = int(position.get("consumed", 0))
        self._left = None if left is None else [(int(start), int(stop)) for start, stop in left]
        if position.get("turn", -1) >= 0:
            self._turn = int(position["turn"])
        self._hand = None if hand is None else _Cut(hand[0], hand[1], hand[1], hand[2])
        if not self._is_open:
            self._out = self.position

    def _whole(self) -> list[Interval]:
        """All positions of an epoch that are dealt out."""
        length = len(self._sampler)
        stop = length - length % self._unit if self._drop else length
        return [(0, stop)] if stop else []

    def _as_dealt(self, hand: _Cut) -> _Cut:
        """A range in hand that a position tells of: its end may have been given back since."""
        if hand.stop >= hand.end:
            return hand
        dealt = self._ask(hand.number, self._reached(), waits=False)
        end = hand.stop if dealt is None else max(hand.stop, min(hand.end, dealt[1]))
        return hand._replace(end=end)

    def _next_range(self, number: int) -> _Cut:
        dealt = None if self._is_dry else self._ask(number, self._reached(), waits=False)
        if dealt is None or dealt == NOTHING:
            self._is_dry = True
            raise StopIteration
        start, end = dealt
        return _Cut(number, start, start, end)

    def _ask(self, number: int, reached: RangePosition, *, waits: bool) -> Interval | None:
        whole = self._whole() if self._left is None else self._left
        back = min(self._turn, self._notes[0].turn) if self._notes else self._turn
        ask = RangeRequest(
            self._turn, self._epoch, number, reached, back, whole, self._unit, self._most, waits
        )
        return self._dealer.deal(ask)

    def _reached(self) -> RangePosition:
        """Where the worker was before the last step that the servers have."""
        _, acknowledged = self._dealer.steps()
        while len(self._notes) > 2 and self._notes[2].made <= acknowledged:
            self._notes.popleft()
        if len(self._notes) > 1 and self._notes[1].made <= acknowledged:
            first = self._notes[0]
            if first.turn == self._turn:
                return first.place
        return RangePosition(0, 0)


class _Batches(Iterator[list[Any]]):
    """What torch's loader takes batches from; it may find some again behind an end."""

    def __init__(self, source: RangeSource) -> None:
        self._source = source

    def __next__(self) -> list[Any]:
        return self._source.next_batch()


def _count(intervals: Sequence[Sequence[int]]) -> int:
    return sum(stop - start for start, stop in intervals)


def _place(position: Mapping[str, Any]) -> RangePosition:
    number, at, _ = position["hand"] or (0, 0, 0)
    return RangePosition(max(0, number), at)


def _refuse(loader: DataLoader[Any], share: Shard) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "fleet.shard: deal='queue' hands out records by their number, which a stream does not "
            "have; leave deal out (each worker then keeps its part of the stream), or read the "
            "files into a dataset with __getitem__"
        )
    refuse_unbatched(loader)
    if share.tail != "join":
        raise ConfigError(
            f"fleet.shard: got deal='queue' and tail={share.tail!r}, but there is no block that "
            "all workers share; leave tail out, and leave the last, short batch out with "
            "DataLoader(drop_last=True)"
        )
